"""Short ways to run an engine in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, free_memory
from localq.engine.reply import Step
from localq.kernels import workspace
from localq.sampling import Sampling

GREEDY = Sampling()


def prompt_of(length: int, seed: int = 0, vocab: int = 320) -> list[int]:
    """Random token ids."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def bare_device() -> None:
    """Give back what nothing holds, and the workspaces of cuBLAS and of our kernels, which outlive every engine: the
    next one takes them anew."""
    free_memory()
    torch._C._cuda_clearCublasWorkspaces()
    workspace._allocate.cache_clear()
    free_memory()


def steps_of(engine: Engine, prompt: list[int], sampling: Sampling = GREEDY, **settings: Any) -> list[Step]:
    """All steps of a reply."""
    return list(engine.generate(prompt, sampling, **settings))


def ids_of(engine: Engine, prompt: list[int], sampling: Sampling = GREEDY, **settings: Any) -> list[int]:
    """The ids of a reply."""
    return [id for step in steps_of(engine, prompt, sampling, **settings) for id in step.ids]


def logits_of(model: Any, loaded: LoadedModel, ids: list[int]) -> Tensor:
    """f32 [T, vocab], or 16 bit on a GPU, of a pass of all `ids` through `model` over the cache of `loaded`."""
    loaded.cache.clear()
    place = {"device": loaded.device}
    with torch.inference_mode():
        positions = torch.arange(len(ids), **place)
        return model(torch.tensor(ids, **place), positions, loaded.cache, len(ids), last_only=False)


def greedy_of(reference: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' `generate` continues with, greedily, never stopping early."""
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
