"""The quantized formats, one module each, listed in FORMATS; formats of stacks of experts in STACKS.

A format is a record of facts (`files.format_facts`) and a module: its docstring is the specification, byte by byte, and
`dequantize` the definition. The contract stands above FORMATS. A folder per format has its codec, its tiles, its Linear
and its kernel's wrapper; `linear.py`, `experts/`, `expert_linears.py` and `samples.py` are common, `cases.py` is the
table of what kernels are tried on, `checkpoint.py` reads files.

Quantizing on a text is `localq.quantize`, what a model is made of `localq.models`. Called by `engine`, `quantize` and
`bench`. Open a format's `__init__` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from localq.formats import bcq, fp8, gguf, mxfp4, nf4, nvfp4, squeezellm, vptq
from localq.formats.codebooks import aqlm, vq2
from localq.formats.int4 import awq, compressed, gptq
from localq.formats.mxfp4 import experts as mxfp4_experts

# The contract. P is the name of a Linear in a checkpoint, `tensors` what its headers say.
#
# docstring                            the specification, byte by byte
# Packed                               the tensors of one matrix as files have them; shape, to, placed
# quantize(weight) -> Packed           where localq makes the format matrix by matrix
# dequantize(packed, dtype) -> Tensor  the definition, and the reference of the kernels
# multiplied(packed) -> Tensor         f32 weights as products take them, where these skip a rounding of the definition
# Linear(packed, bias)                 a `SlabLinear`: x [T, in] -> [T, out]; its `operand()` is what a launch takes
# VARIANTS                             the schemes with code of their own; the first is the usual one
# sample(shape, seed, device, scheme)  -> Packed of random weights, rows of about unit gain
# BLOCK                                columns are a multiple of it
# bytes(out, in) -> int                device bytes of one matrix
# join(shape, parts), joined_bytes     experts as rows of one matrix, where the format allows it
#
# quant_method, suffixes               what config.json calls it; the tensors P + suffix, of which every P has the first
# namings                              or the first of one of these, where files name them in several ways
# is_quantized(tensors, P) -> bool     the checkpoint holds P in this format
# stored_bytes, placed_bytes           bytes of P in a checkpoint; of each tensor on a device, in the order of `placed`
# sized_by_checkpoint                  `placed_bytes` takes the checkpoint too
# stored_shape(checkpoint, P)          (out, in), before any large tensor is read
# from_checkpoint(checkpoint, P)       -> Packed on the CPU; raises LocalqError (exit 8) for damage
# layout(out, in, scheme)              suffix -> (dtype, shape); stored(packed): suffix -> tensor
# to_tensors(packed, P)                the same by full name, on the CPU
# quantization_config(dtype, skipped, scheme, columns)   config.json's entry
# shared_names, idle_biases            tensors that P reads and does not own; P.bias may be there and all zeros
#
# A module of STACKS has the second block for a parameter N [experts, out, in], and dequantized(checkpoint, N, dtype).
FORMATS: dict[str, ModuleType] = {
    "nf4": nf4,
    "mxfp4": mxfp4,
    "aqlm": aqlm,
    "vptq": vptq,
    "vq2": vq2,
    "bcq": bcq,
    "squeezellm": squeezellm,  # before those that have tensors of the same name
    "awq": awq,
    "gptq": gptq,
    "nvfp4": nvfp4,  # before the one that has a tensor of the same name
    "compressed-tensors": compressed,
    "fp8": fp8,
    "gguf": gguf,
}

STACKS: dict[str, ModuleType] = {"mxfp4": mxfp4_experts}  # formats of experts; the same keys


def shared_names(module: ModuleType, tensors: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """The tensors outside P that the Linear P in the format `module` reads.

    Several Linears share them, so `stored_bytes` and `placed_bytes` leave them out and the caller counts them once.
    """
    return tuple(module.shared_names(tensors, prefix)) if hasattr(module, "shared_names") else ()


def keys(module: ModuleType, tensors: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """The tensors of the Linear P, by full name."""
    return tuple(prefix + suffix for suffix in naming(module, tensors, prefix) if prefix + suffix in tensors)


def naming(module: ModuleType, tensors: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """The suffixes of the tensors of the Linear P: of several namings the first of which P has the first tensor."""
    found = (suffixes for suffixes in _namings(module) if prefix + suffixes[0] in tensors)
    return next(found, _namings(module)[0])


def _namings(module: ModuleType) -> tuple[tuple[str, ...], ...]:
    given: tuple[tuple[str, ...], ...] = getattr(module, "namings", (module.suffixes,))
    return given


def placed_bytes(module: ModuleType, checkpoint: Any, prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear P on a device; checkpoint: a `formats.checkpoint.Checkpoint`."""
    given = (checkpoint,) if getattr(module, "sized_by_checkpoint", False) else ()
    sizes: list[int] = module.placed_bytes(checkpoint.tensors, prefix, *given)
    return sizes


def owner(tensors: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """(format, P) where `key` is the first tensor of a Linear P that a checkpoint holds quantized; None for others."""
    for format, module in FORMATS.items():
        for suffixes in _namings(module):
            prefix = key.removesuffix(suffixes[0])
            if prefix != key and module.is_quantized(tensors, prefix) and suffixes == naming(module, tensors, prefix):
                return format, prefix
    return None
