"""Experts in MXFP4, as gpt-oss is published: the matrices of a layer's experts in one pair of tensors.

N_blocks  u8 [experts, out, in/32, 16]
N_scales  u8 [experts, out, in/32]

where N is the parameter, `model.layers.0.mlp.experts.gate_up_proj`. In 16 bit transformers stores the same as N
[experts, in, out]. Behind each other the experts are one tall matrix of MXFP4, [experts * out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.formats import mxfp4
from localq.formats.checkpoint import Checkpoint

suffixes = ("_blocks", "_scales")


def is_quantized(tensors: Mapping[str, Any], name: str) -> bool:
    """Return whether the stack `name` is stored in MXFP4. The matrix of a Linear, "P.weight", is none."""
    return name + suffixes[0] in tensors and not name.endswith(".weight")


def stored_bytes(tensors: Mapping[str, Any], name: str) -> int:
    """Bytes of the stack `name` in a checkpoint."""
    return sum(tensors[name + suffix].nbytes for suffix in suffixes if name + suffix in tensors)


def placed_bytes(tensors: Mapping[str, Any], name: str) -> list[int]:
    """Bytes of codes and of scales, there and on a device."""
    return [tensors[name + suffix].nbytes for suffix in suffixes if name + suffix in tensors]


def stored_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int, int]:
    """[experts, out, in] of the stack `name`; raises LocalqError (exit 8) where its tensors do not fit together."""
    experts, out, columns = mxfp4.checked(checkpoint, name, 3)
    return experts, out, columns


def from_checkpoint(checkpoint: Checkpoint, name: str) -> mxfp4.Packed:
    """The stack `name` as one matrix [experts * out, in], on the CPU.

    Raises LocalqError (exit 8) unless it is sound.
    """
    experts, out, columns = stored_shape(checkpoint, name)
    scales = mxfp4.read_scales(checkpoint, f"{name}_scales")
    codes = checkpoint.read(name + suffixes[0])
    return mxfp4.Packed(codes.reshape(experts * out, columns // 2), scales.reshape(experts * out, -1))


def dequantized(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """The stack `name`, [experts, out, in] of `dtype` on the CPU.

    Raises LocalqError (exit 8) unless its tensors are sound.
    """
    shape = stored_shape(checkpoint, name)
    return mxfp4.dequantize(from_checkpoint(checkpoint, name), dtype).view(shape)
