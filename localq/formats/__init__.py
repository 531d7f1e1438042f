"""The quantized formats, one module each. A reader finds every format in this dict.

A format module has
  its docstring                        the format, byte by byte
  Packed                               the tensors of one matrix and its `shape`; .to(device) -> the same there;
                                       .placed(place, device) -> the same, copied by `place`
  dequantize(packed, dtype) -> Tensor  the definition of the format and the reference of its kernels
  bytes(out, in) -> int                device bytes of one matrix
  quant_method                         what config.json calls it
  suffixes                             the checkpoint tensors P + suffix that a Linear P owns; every P has the first
  is_quantized(tensors, P) -> bool     does a checkpoint hold P in this format?
  stored_bytes(tensors, P) -> int      what P takes there: codes, scales, tables
  placed_bytes(tensors, P) -> [int]    what each tensor of P takes on a device, in the order of Packed.placed
  stored_shape(checkpoint, P)          (out, in) of P, before any of its large tensors is read
  from_checkpoint(checkpoint, P) -> Packed
  shared_names(tensors, P) -> [str]    where Linears may share tensors: those that P reads and does not own
  idle_biases                          where files may hold P.bias, all zeros, for a Linear that has none: True
  Linear(packed, bias)                 a `slabs.SlabLinear`: x [T, in] -> [T, out]

and one that is made tensor by tensor (`Format.made_from`) besides
  quantize(weight) -> Packed           weight f32 | bf16 | f16 [out, in]
  to_tensors(packed, P) -> dict, layout(out, in) -> dict
  quantization_config(dtype, skipped)  what config.json says about a checkpoint in this format

A format of experts, which lie in stacks of matrices N, one parameter each, has a module in `STACKS` with
  suffixes                             the checkpoint tensors N + suffix that a stack owns; every N has the first
  is_quantized(tensors, N) -> bool
  stored_bytes(tensors, N) -> int
  placed_bytes(tensors, N) -> [int]
  stored_shape(checkpoint, N)          (experts, out, in)
  from_checkpoint(checkpoint, N)       Packed of the format, all experts as one matrix [experts * out, in]
  dequantized(checkpoint, N, dtype) -> Tensor [experts, out, in]
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from localq.formats import bcq, mxfp4, nf4, squeezellm, vptq
from localq.formats.codebooks import aqlm, vq2
from localq.formats.int4 import awq, gptq
from localq.formats.mxfp4 import experts as mxfp4_experts

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
}

STACKS: dict[str, ModuleType] = {"mxfp4": mxfp4_experts}  # formats of experts; the same keys


def shared_names(module: ModuleType, tensors: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """The tensors outside P that the Linear P in the format `module` reads: `stored_bytes` and the like leave them out,
    for whoever counts must count them once."""
    return tuple(module.shared_names(tensors, prefix)) if hasattr(module, "shared_names") else ()


def owner(tensors: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """(format, P) where `key` is the first tensor of a Linear P that a checkpoint holds quantized; None for others."""
    for format, module in FORMATS.items():
        prefix = key.removesuffix(module.suffixes[0])
        if prefix != key and module.is_quantized(tensors, prefix):
            return format, prefix
    return None
