"""The experts of mixtures on random numbers, named as they are published.

Where gate and up alternate (gpt-oss), a layer's experts are stacks in MXFP4, whatever the rest is in; else one matrix
each, in the format of the model, but for formats whose samples have large codebooks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.bench.synthetic.tensors import Matrix, TensorSpec
from localq.engine.load.expert_pieces import PARTS
from localq.files import format_facts
from localq.formats import FORMATS, mxfp4
from localq.formats.checkpoint import info
from localq.formats.mxfp4 import experts as mxfp4_experts
from localq.models.decoder import Decoder
from localq.models.experts import Experts


def stacks(model: Decoder, format: str) -> dict[str, tuple[int, int, int]]:
    """The experts that `format` takes: name of the parameter -> [E, out, in]."""
    found: dict[str, tuple[int, int, int]] = {}
    for path, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, Experts) and _takes(format, module.interleaved):
            found |= {f"{path}.{leaf}": tuple(getattr(module, leaf).shape) for leaf in module.parts}
    return found


def matrices(model: Decoder, format: str) -> dict[str, tuple[int, int]]:
    """The experts that are one matrix each: name in a checkpoint -> [out, in]."""
    found: dict[str, tuple[int, int]] = {}
    for name, (experts, out, columns) in stacks(model, format).items():
        path, _, leaf = name.rpartition(".")
        pieces = () if model.get_submodule(path).interleaved else PARTS[leaf]
        shape = out // len(PARTS[leaf]), columns
        found |= {f"model.{path}.{expert}.{piece}": shape for expert in range(experts) for piece in pieces}
    return found


def stack_specs(model: Decoder, format: str) -> dict[str, TensorSpec]:
    """The tensors of those that are stacks in MXFP4, by name in a checkpoint."""
    found: dict[str, TensorSpec] = {}
    for name, shape in stacks(model, format).items():
        if model.get_submodule(name.rpartition(".")[0]).interleaved:
            found |= _stack(f"model.{name}", shape)
    return found


def _takes(format: str, interleaved: bool) -> bool:
    if format not in FORMATS:
        return False
    facts = format_facts.of(format)
    return (
        facts.experts_only or facts.keeps_experts if interleaved else getattr(FORMATS[format], "SAMPLES_EXPERTS", True)
    )


def _stack(name: str, shape: tuple[int, int, int]) -> dict[str, TensorSpec]:
    experts, out, columns = shape
    blocks = (experts, out, columns // mxfp4.BLOCK)
    described = zip(mxfp4_experts.suffixes, ((*blocks, mxfp4.BLOCK // 2), blocks), strict=True)
    names = {name + suffix: each for suffix, each in described}

    def make(seed: int, device: torch.device) -> dict[str, Tensor]:
        packed = mxfp4.sample((experts * out, columns), seed, device)
        both = zip(names.items(), (packed.codes, packed.scales), strict=True)
        return {key: tensor.view(each) for (key, each), tensor in both}

    matrix = Matrix(name, make)
    return {key: TensorSpec(info(torch.uint8, each), matrix) for key, each in names.items()}
