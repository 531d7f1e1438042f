"""Tensor jobs: what a conversion writes for each source tensor. Pure functions of the headers.

The Linear weights of the decoder blocks are quantized; everything else is copied. Experts that the source stacks into
one tensor become one matrix each, under the published names, as bitsandbytes' layout requires. transformers 4 reads
that; transformers 5, which stacks experts, does not (tried with 5.23, from any source).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from localq.files.model_types import MODEL_TYPES
from localq.formats.checkpoint import TensorInfo, info

_BLOCK_LINEAR = re.compile(
    r"(?:(?:model|language_model)\.)*mtp\.fc\.weight"
    r"|(?:(?:model|language_model|text_model|mtp|backbone)\.)*layers\.\d+\.(?:\w+\.)*"
    r"(?:q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|qkv_proj"
    r"|gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3|input_linear|output_linear"
    r"|linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)|(?:conv|mixer|mamba)\.(?:in_proj|out_proj)|self_attn\.out_proj)"
    r"\.weight"
)
# Parts of models with recurrent layers that no format takes -> what they are, for users.
_KEPT = {
    "linear_attn.in_proj_a": "DeltaNet decay and update rates",
    "linear_attn.in_proj_b": "DeltaNet decay and update rates",
    "linear_attn.conv1d": "convolutions",
    "conv.conv": "convolutions",
    "mixer.conv1d": "convolutions",
    "mamba.conv1d": "convolutions",
    "feed_forward.gate": "routers",
    "mixer.gate": "routers",
    "mlp.gate": "routers",
    "mlp.shared_expert_gate": "shared-expert gates",
}
_STACK = re.compile(
    r"((?:(?:model|language_model|mtp|backbone)\.)*layers\.\d+\.)(?:(?:mlp|mixer|block_sparse_moe)\.)?"
    r"(?:experts\.(?=\w+$)|(?=\w+_linear))(gate_up_proj|up_proj|down_proj|input_linear\.weight|output_linear\.weight)"
)
_TOWER = re.compile(r"(?:model\.)?(\w*(?:vision|visual|audio|projector)\w*)\.")


@dataclass(frozen=True)
class TensorJob:
    """One source tensor, and the tensors that are written for it, quantized or copied.

    experts   prefixes of the matrices of a stack [experts, parts * out, in], of each expert the parts; else empty
    """

    name: str
    source: TensorInfo
    outputs: dict[str, TensorInfo]
    quantized: bool
    experts: tuple[tuple[str, ...], ...] = ()

    def matrices(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (prefix, matrix) for every matrix to quantize in the source's `tensor`."""
        if not self.experts:
            yield self.name.removesuffix(".weight"), tensor
        for prefixes, weight in zip(self.experts, tensor if self.experts else (), strict=True):
            yield from zip(prefixes, weight.chunk(len(prefixes)), strict=True)


def is_block_linear(name: str, shape: tuple[int, ...]) -> bool:
    """True for the weight of a Linear within a decoder block or an MTP block, in every known family.

    Covers separate and fused projections (llama, phi3) and two-dimensional experts; not embeddings, the head, norms,
    biases, router gates ("mlp.gate"), nor any layer of a vision or audio tower.
    """
    return len(shape) == 2 and _BLOCK_LINEAR.fullmatch(name) is not None


def plan_jobs(tensors: dict[str, TensorInfo], module: ModuleType, kind: str, model_type: str = "") -> list[TensorJob]:
    """Return a job for each tensor, in processing order."""
    jobs = []
    for name, source in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        experts = experts_of(name, source.shape, model_type)
        if (experts or is_block_linear(name, source.shape)) and source.shape[-1] % module.BLOCK == 0:
            prefixes = [each for expert in experts for each in expert] or [name.removesuffix(".weight")]
            rows = source.shape[-2] // len(experts[0]) if experts else source.shape[0]
            parts = maker_of(module, prefixes[0]).layout(rows, source.shape[-1]).items()
            outputs = {prefix + suffix: info(*of_suffix) for prefix in prefixes for suffix, of_suffix in parts}
            jobs.append(TensorJob(name, source, outputs, quantized=True, experts=experts))
        else:
            # GGUF tensors are dequantized to float32; these models are published in bfloat16.
            kept = info(torch.bfloat16, source.shape) if kind == "gguf" else source
            jobs.append(TensorJob(name, source, {published_name(name, model_type): kept}, quantized=False))
    return jobs


def maker_of(module: Any, prefix: str) -> Any:
    """Return the quantizer of the matrix `prefix`: the format, or its own parameters (`binary_mixture.MixedFormat`)."""
    return module.of_matrix(prefix) if hasattr(module, "of_matrix") else module


def experts_of(name: str, shape: tuple[int, ...], model_type: str) -> tuple[tuple[str, ...], ...]:
    """Return the prefixes of each expert's matrices in the stack `name`; empty where it cannot be split."""
    traits = MODEL_TYPES.get(model_type)
    match = _STACK.fullmatch(name) if traits and traits.expert_parts and len(shape) == 3 and all(shape) else None
    if traits is None or match is None:
        return ()
    home, parts = f"{match[1]}{traits.expert_module}".rstrip("."), traits.expert_parts.get(match[2], ())
    if not parts or shape[1] % len(parts):
        return ()
    return tuple(tuple(f"{home}.experts.{expert}.{part}" for part in parts) for expert in range(shape[0]))


def published_name(name: str, model_type: str) -> str:
    """Return the published name of a tensor; sources written by transformers 5 name routers differently."""
    traits = MODEL_TYPES.get(model_type)
    home = (traits.expert_module if traits else "") or "mlp"
    return name.replace(".mlp.gate.", f".{home}.gate.")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def skipped_modules(jobs: list[TensorJob]) -> list[str]:
    """Return the Linear modules that stay unquantized, by the end of a name or by their tower."""
    names = {"lm_head"}
    for job in jobs:
        if job.quantized or len(job.source.shape) != 2 or not job.name.endswith(".weight") or "embed" in job.name:
            continue
        if tower := _TOWER.match(job.name):
            names |= {tower[1], f"model.{tower[1]}"}
        else:
            written = next(iter(job.outputs))
            names.add(re.sub(r"^((model|language_model|backbone)\.)*", "", written.removesuffix(".weight")))
    return sorted(names)


def notes(jobs: list[TensorJob], block: int) -> list[str]:
    """Return notes for the user: matrices that do not fit the format's blocks, and experts that stay unquantized."""
    copied = [job for job in jobs if not job.quantized]
    stacks = [job for job in copied if _STACK.fullmatch(job.name)]
    uneven = [job for job in copied if job.source.shape[-1:] and job.source.shape[-1] % block]
    found = []
    if kept := [job for job in uneven if is_block_linear(job.name, job.source.shape) or job in stacks]:
        found.append(
            f"{len(kept)} matrices are left unquantized because their row length is not a multiple of {block} "
            f"(first: {kept[0].name}, {kept[0].source.shape[-1]} columns)."
        )
    if whole := [job for job in stacks if job not in uneven]:
        found.append(f"{len(whole)} expert tensors are left unquantized because they cannot be split into matrices.")
    if (small := [_kept(job.name) for job in copied]) and any(each.endswith(("conv1d", "conv.conv")) for each in small):
        kinds: dict[str, list[str]] = {}
        for name in (name for name in _KEPT if name in small):
            kinds.setdefault(_KEPT[name], []).append(name.rpartition(".")[2])
        parts = ", ".join(f"{what} ({', '.join(names)})" for what, names in kinds.items())
        found.append(f"Small tensors left at 16 bits because errors in them would affect every later token: {parts}.")
    return found


def _kept(name: str) -> str:
    """The key of `_KEPT` of a tensor in a block; "" for others."""
    match = re.fullmatch(r".*layers\.\d+\.(\w+\.\w+)\.weight", name)
    return match[1] if match and match[1] in _KEPT else ""
