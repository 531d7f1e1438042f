"""Experts in MXFP4 (`mxfp4.py`), as gpt-oss is published: the matrices of a layer's experts in one pair of tensors.

N_blocks  u8 [experts, out, in/32, 16]
N_scales  u8 [experts, out, in/32]

where N is the parameter, `model.layers.0.mlp.experts.gate_up_proj`. In 16 bit transformers stores the same as N
[experts, in, out], and so the model has it: `dequantized` transposes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.quant import mxfp4

suffixes = ("_blocks", "_scales")


def is_quantized(tensors: Mapping[str, Any], name: str) -> bool:
    """Does the checkpoint hold the stack `name` in MXFP4? The matrix of a Linear, "P.weight", is none."""
    return name + suffixes[0] in tensors and not name.endswith(".weight")


def stored_bytes(tensors: Mapping[str, Any], name: str) -> int:
    """Bytes of the stack `name` in a checkpoint."""
    return sum(tensors[name + suffix].nbytes for suffix in suffixes if name + suffix in tensors)


def stored_shape(checkpoint: mxfp4.Checkpoint, name: str) -> tuple[int, int, int]:
    """[experts, in, out] of the stack `name`; raises LocalqError (exit 8) where its tensors do not fit together."""
    experts, out, columns = mxfp4.checked(checkpoint, name, 3)
    return experts, columns, out


def dequantized(checkpoint: mxfp4.Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """The stack `name`, [experts, in, out] of `dtype` on the CPU: one expert at a time, so that nothing else is large.

    Raises LocalqError (exit 8) unless its tensors are sound.
    """
    experts, columns, out = stored_shape(checkpoint, name)
    scales = mxfp4.read_scales(checkpoint, name)
    codes = checkpoint.read(name + suffixes[0]).reshape(experts, out, columns // 2)
    weight = torch.empty(experts, columns, out, dtype=dtype)
    for expert in range(experts):
        weight[expert] = mxfp4.dequantize(mxfp4.Packed(codes[expert], scales[expert]), dtype).T
    return weight
