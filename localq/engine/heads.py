"""The output head in fewer bits than the checkpoint has it: quantized while it is loaded.

A tied model gets a head of its own, so that its embedding table can leave the device. On the CPU the head is
dequantized again, as all quantized weights are there: the reference of what a GPU computes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.quant import int8, nf4


def quantized(weight: Tensor, head: str, dtype: torch.dtype) -> nn.Module:
    """weight [vocab, hidden] on its device -> the head in "8" or "nf4" there.

    Raises LocalqError (exit 8) for weights that are not finite in NF4.
    """
    if head == "nf4":
        packed = nf4.quantize(weight)
        if not weight.is_cuda:
            return _plain(nf4.dequantize(packed, dtype))
        linear = nf4.Linear(packed)
        linear.tile_()
        return linear
    coded = int8.quantize(weight)
    return int8.Linear(coded.codes, coded.scales, None) if weight.is_cuda else _plain(int8.dequantize(coded, dtype))


def _plain(weight: Tensor) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
