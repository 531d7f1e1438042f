"""What a conversion does to each tensor, and what it tells transformers about it. Pure functions of the headers.

Quantized are the Linear weights of the decoder blocks; everything else is copied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType

import torch

from localq.checkpoint import TensorInfo, info

_BLOCK_LINEAR = re.compile(
    r"(?:(?:model|language_model|text_model)\.)*layers\.\d+\.(?:\w+\.)*"
    r"(?:q_proj|k_proj|v_proj|o_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)\.weight"
)
_TOWER = re.compile(r"(?:model\.)?(\w*(?:vision|visual|audio|projector)\w*)\.")


@dataclass(frozen=True)
class Job:
    """One source tensor: what it is, and what is written for it (names and descriptions, quantized or copied)."""

    name: str
    source: TensorInfo
    outputs: dict[str, TensorInfo]
    quantized: bool


def is_block_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Is this checkpoint tensor the weight of a Linear within a decoder block? Holds for every known family.

    Covers separate and fused projections (llama, phi3) and two-dimensional experts; not embeddings, the head, norms,
    biases, router gates ("mlp.gate"), nor any layer of a vision or audio tower.
    """
    return len(shape) == 2 and _BLOCK_LINEAR.fullmatch(name) is not None


def plan_jobs(tensors: dict[str, TensorInfo], module: ModuleType, kind: str) -> list[Job]:
    """What becomes of each tensor, in the order in which they are worked on."""
    jobs = []
    for name, source in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        if is_block_linear(name, source.shape) and source.shape[1] % module.BLOCK == 0:
            prefix = name.removesuffix(".weight")
            parts = module.layout(*source.shape).items()
            outputs = {prefix + suffix: info(dtype, shape) for suffix, (dtype, shape) in parts}
            jobs.append(Job(name, source, outputs, quantized=True))
        else:
            # What GGUF stores is dequantized to float32; bfloat16 is the type that these models were published in.
            kept = info(torch.bfloat16, source.shape) if kind == "gguf" else source
            jobs.append(Job(name, source, {name: kept}, quantized=False))
    return jobs


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def skipped_modules(jobs: list[Job]) -> list[str]:
    """The Linear modules that stay unquantized, matched by the end of a name or by a tower's."""
    names = {"lm_head"}
    for job in jobs:
        if job.quantized or len(job.source.shape) != 2 or not job.name.endswith(".weight") or "embed" in job.name:
            continue
        if tower := _TOWER.match(job.name):
            names |= {tower[1], f"model.{tower[1]}"}
        else:
            names.add(re.sub(r"^((model|language_model)\.)*", "", job.name.removesuffix(".weight")))
    return sorted(names)


def notes(jobs: list[Job], block: int) -> list[str]:
    """What the user must know: matrices that the format, in blocks of so many weights, cannot take."""
    kept = [job for job in jobs if not job.quantized and is_block_linear(job.name, job.source.shape)]
    if not kept:
        return []
    first = kept[0]
    return [
        f"{len(kept)} matrices stay unquantized: their rows are no multiple of {block} long "
        f"(the first: {first.name}, {first.source.shape[1]} columns)."
    ]
