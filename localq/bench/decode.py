"""Decode speed of a whole model, beside what it is compared with in the same run.

CPU: transformers' `generate` with the same weights in the same type. GPU: the same step without a graph, and, for
quantized weights, the same engine with the weights dequantized. Correctness first: what is timed must give the same
tokens. Runs alternate, medians count, and the bandwidth that the weights were read with stands beside a measured one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

import localq
from localq import driver
from localq.bench.roofline import read_bytes_per_s
from localq.checkpoint import open_checkpoint
from localq.engine import device as devices
from localq.engine.generate import Engine
from localq.engine.load import LoadedModel, Options, free_memory, load
from localq.errors import LocalqError
from localq.modelfiles import ModelFiles, open_model
from localq.quant import nf4
from localq.sampling import Sampling

PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """One reply: its ids and its decode speed (the first token belongs to the prefill)."""

    ids: list[int]
    tokens_per_s: float


def run(path: Path, out: TextIO, device: str = "auto", dtype: str = "auto", tokens: int = 128, repeat: int = 5) -> Any:
    """Measure `path`, tell `out`, and return what the last line says as JSON (a dict, units in the key names)."""
    files = open_model(path)
    model = load(files, Options(device=device, dtype=dtype))
    conditions = _conditions(model, files, tokens, repeat)
    print(", ".join(f"{key} {value}" for key, value in conditions.items()), file=out)
    for note in model.notes:
        print(note, file=out)
    moved = bytes_per_token(model, PROMPT_TOKENS + tokens // 2)  # before the rivals change the model
    measured = _on_gpu(model, tokens, repeat) if model.device.type == "cuda" else _on_cpu(model, files, tokens, repeat)
    speeds = {name: statistics.median(each.tokens_per_s for each in runs) for name, runs in measured.items()}
    for name, runs in measured.items():
        low, high = min(each.tokens_per_s for each in runs), max(each.tokens_per_s for each in runs)
        print(f"{name}: {speeds[name]:.1f} tok/s (median of {repeat}, {low:.1f} to {high:.1f})", file=out)
    roof = read_bytes_per_s(model.device)
    share = speeds["localq"] * moved / roof
    print(f"{moved / 1e9:.3f} GB per token: {share:.0%} of the measured {roof / 1e9:.0f} GB/s", file=out)
    result = {
        **conditions,
        **{f"{name}_tok_per_s": round(speed, 2) for name, speed in speeds.items()},
        **{
            f"ratio_to_{name}": round(speeds["localq"] / speed, 3) for name, speed in speeds.items() if name != "localq"
        },
        "same_tokens": {name: _same(measured["localq"][0].ids, runs[0].ids) for name, runs in measured.items()},
        "bytes_per_token": moved,
        "roof_bytes_per_s": round(roof),
        "share_of_roof": round(share, 3),
    }
    print(json.dumps(result), file=out)
    return result


def bytes_per_token(model: LoadedModel, length: int) -> int:
    """Bytes that one decode step at `length` positions must read: all weights, one embedding row, keys and values."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.model.parameters(), *model.model.buffers())}
    count = sum(tensor.nbytes for tensor in tensors.values())
    table = model.model.embed_tokens.weight
    if model.model.lm_head is not None:  # otherwise the table is the head and read whole
        count -= table.nbytes - table[0].nbytes
    return count + model.cache.bytes() * min(length, model.ctx) // model.ctx


def _on_cpu(model: LoadedModel, files: ModelFiles, tokens: int, repeat: int) -> dict[str, list[Run]]:
    engine, reference = Engine(model), _reference(model, files)
    prompt = _prompt(model.vocab)
    return _alternate(
        {
            "localq": lambda: _reply(engine, prompt, tokens),
            "transformers": lambda: _generate(reference, prompt, tokens),
        },
        repeat,
    )


def _on_gpu(model: LoadedModel, tokens: int, repeat: int) -> dict[str, list[Run]]:
    prompt = _prompt(model.vocab)
    graphs, eager = Engine(model), Engine(model, use_graphs=False)
    measured = _alternate(
        {"localq": lambda: _reply(graphs, prompt, tokens), "eager": lambda: _reply(eager, prompt, tokens)}, repeat
    )
    if measured["localq"][0].ids != measured["eager"][0].ids:
        raise LocalqError("bench", "the captured graph and the eager step give different tokens", "Report this.")
    if any(isinstance(module, nf4.Linear) for module in model.model.modules()):
        del graphs, eager
        dense = Engine(dequantized(model))
        name = str(model.dtype).removeprefix("torch.")
        measured |= _alternate({name: lambda: _reply(dense, prompt, tokens)}, repeat)
    return measured


def _alternate(candidates: dict[str, Callable[[], Run]], repeat: int) -> dict[str, list[Run]]:
    """One warm-up each, then `repeat` rounds in turn, so that a slow minute hits all alike."""
    for candidate in candidates.values():
        candidate()
    runs: dict[str, list[Run]] = {name: [] for name in candidates}
    for _ in range(repeat):
        for name, candidate in candidates.items():
            runs[name].append(candidate())
    return runs


def _reply(engine: Engine, prompt: list[int], tokens: int) -> Run:
    steps = list(engine.generate(prompt, Sampling(), max_tokens=tokens))
    return Run([id for step in steps for id in step.ids], steps[-1].stats.tokens_per_s)


def _generate(reference: Any, prompt: list[int], tokens: int) -> Run:
    """transformers' greedy `generate`, timed from its first token to its last."""
    stamps: list[float] = []

    def stamp(ids: Tensor, scores: Tensor) -> Tensor:
        stamps.append(time.perf_counter())
        return scores

    ids = torch.tensor([prompt])
    made = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=[stamp],
    )
    return Run(made[0, len(prompt) :].tolist(), (tokens - 1) / (stamps[-1] - stamps[0]))


def _reference(model: LoadedModel, files: ModelFiles) -> Any:
    """transformers' model with the same weights in the same type: read from the same file, dequantized."""
    from transformers import AutoConfig, AutoModelForCausalLM  # only benchmarks need it: 3 s of start-up

    fields = {key: value for key, value in files.config.items() if key not in ("model_type", "quantization_config")}
    config = AutoConfig.for_model(files.config["model_type"], **fields)
    reference = AutoModelForCausalLM.from_config(config, dtype=model.dtype)  # type: ignore[no-untyped-call]
    state = {}
    with open_checkpoint(files) as checkpoint:
        for key in checkpoint.tensors:
            prefix = key.removesuffix(".weight")
            if nf4.is_quantized(checkpoint.tensors, prefix):
                state[key] = nf4.dequantize(nf4.from_checkpoint(checkpoint, prefix), model.dtype)
            elif key in reference.state_dict():
                state[key] = checkpoint.read(key)
    missing = reference.load_state_dict(state, strict=False).missing_keys
    reference.tie_weights()
    if missing and not (missing == ["lm_head.weight"] and config.tie_word_embeddings):
        raise LocalqError("bench", f"transformers' model lacks the weight {missing[0]!r}", "Report this as a bug.")
    return reference.eval()


def dequantized(model: LoadedModel) -> LoadedModel:
    """`model` with every quantized Linear replaced by a plain one, in place (the quantized weights are gone then)."""
    free_memory()
    for path, module in list(model.model.named_modules()):
        if isinstance(module, nf4.Linear):
            bias = module.bias
            linear = nn.Linear(module.in_features, module.out_features, bias=bias is not None, device="meta")
            linear.weight = nn.Parameter(nf4.dequantize(module.packed, model.dtype), requires_grad=False)
            if bias is not None:
                linear.bias = nn.Parameter(bias, requires_grad=False)
            parent, _, leaf = path.rpartition(".")
            setattr(model.model.get_submodule(parent), leaf, linear)
    return replace(model, format="dequantized")


def _prompt(vocab: int) -> list[int]:
    return torch.randint(vocab, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


def _same(ids: list[int], others: list[int]) -> int:
    """How many leading tokens agree."""
    agree = [mine == theirs for mine, theirs in zip(ids, others, strict=False)]
    return agree.index(False) if False in agree else len(agree)


def _conditions(model: LoadedModel, files: ModelFiles, tokens: int, repeat: int) -> dict[str, Any]:
    conditions = {
        "model": files.name,
        "format": model.format,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": devices.device_name(model.device),
        "tokens": tokens,
        "repetitions": repeat,
        "localq": localq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if model.device.type == "cpu":
        return {**conditions, "threads": torch.get_num_threads(), "load_average": round(os.getloadavg()[0], 2)}
    served = driver.probe_driver().cuda_version
    capability = torch.cuda.get_device_capability(model.device)
    return {**conditions, "driver_cuda": ".".join(map(str, served)), "sm": "".join(map(str, capability))}
