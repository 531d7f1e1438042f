"""The output head in fewer bits than the checkpoint has it: quantized while it is loaded.

A tied model gets a head of its own, so that its embedding table can leave the device. On the CPU the head is
dequantized again, as all quantized weights are there: the reference of what a GPU computes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.formats import int8, nf4


def quantized(weight: Tensor, head: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """weight [vocab, hidden], from wherever it lies -> the head in "8" or "nf4" on `device`, some rows at a time.

    Raises LocalqError (exit 8) for weights that are not finite in NF4.
    """
    if head == "nf4":
        packed = nf4.quantize(weight, device)
        if device.type == "cpu":
            return _plain(nf4.dequantize(packed, dtype))
        linear = nf4.Linear(packed)
        linear.tile_()
        return linear
    coded = int8.quantize(weight, device)
    if device.type == "cpu":
        return _plain(int8.dequantize(coded, dtype))
    return int8.Linear(coded.codes, coded.scales, None)


def _plain(weight: Tensor) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
