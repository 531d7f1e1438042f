"""Draft models for the tiny llama of the engine tests, and engines that have one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from localq.engine.draft.drafter import Drafter
from localq.engine.generate import Engine
from localq.engine.load.draft import load_draft
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.models.tiny_checkpoints import make_checkpoint

KINDS = ("same", "near", "wrong", "padded", "few ids", "short", "windowed")
OPTIONS = LoadOptions(device="cpu", dtype="float32", draft_tokens=7)
_OVERRIDES = {
    "wrong": {"hidden_size": 64, "num_hidden_layers": 2, "seed": 7},
    "padded": {"vocab_size": 384, "seed": 8, "initializer_range": 0.3},
    "few ids": {"vocab_size": 290, "seed": 9, "initializer_range": 0.15},
    "short": {"max_position_embeddings": 64, "seed": 10},
}


def save_draft(kind: str, target: Path, folder: Path) -> Path:
    """A draft model of this kind.

    same      the weights of the target: all that it drafts for a greedy reply is accepted
    near      the same with noise: some of it is
    wrong     other weights, other sizes
    padded    more ids than the target; few ids: fewer
    short     a context of 64 tokens
    windowed  layers whose window of 16 tokens slides
    """
    if kind == "same":
        return target
    if kind == "windowed":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        return make_checkpoint(folder, "gemma3_text", initializer_range=0.15, layer_types=layers, seed=11)
    if kind != "near":
        return make_checkpoint(folder, dtype=torch.float32, **_OVERRIDES[kind])
    folder.mkdir()
    tensors, generator = {}, torch.Generator().manual_seed(5)
    for shard in sorted(target.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            tensors[name] = tensor + 0.03 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((target / name).read_bytes())
    return folder


def engine_with(target: Path, draft: Path) -> Engine:
    """An engine whose replies are drafted by the model `draft`, too."""
    files = open_model(draft)
    model = load(open_model(target), OPTIONS, draft=files)
    return Engine(model, draft_tokens=7, draft=load_draft(files, model, OPTIONS, lambda *report: None))


def new_drafter(engine: Engine) -> Drafter:
    """A drafter without a past, of the engine's draft model."""
    return Drafter(engine._draft_model)
