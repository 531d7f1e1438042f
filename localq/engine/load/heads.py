"""The output head in fewer bits than the checkpoint stores: quantized at load time.

A tied model gets a separate head, so that its embedding table can leave the device. On the CPU the head is dequantized
again, like all quantized weights there: the reference for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.formats import int8, nf4


def quantize_head(weight: Tensor, head: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Quantize weight [vocab, hidden], from any device, to a head in "8" or "nf4" on `device`, some rows at a time.

    Raises LocalqError (exit 8) for non-finite weights in NF4.
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
    return int8.Linear(coded)


def _plain(weight: Tensor) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
