"""Symmetric 8-bit weights, one scale per row: for the output head, whose rows are read whole for every token.

A weight matrix [out, in], in % 16 == 0:

codes   i8  [out, in]    -127 .. 127; -128 is never written
scales  f32 [out]        largest absolute value of the row / 127; 0 for a row of zeros

weight_ij = codes_ij * scales_i                     one f32 product, then rounded to the wanted dtype
codes_ij = round(weight_ij / scales_i)              in f32, ties to even; 0 in a row of zeros

8 + 32/in bits per weight: 8.008 at 4096 columns. It is made while a model is loaded, and is no format of checkpoints.

What it costs the head of SmolLM2-135M (576 columns; CPU, 512 tokens of the licence text, logits against those of the
checkpoint's head): mean KL 1.3e-3 nats, equal first choice 99.2 %. With one scale per 64 columns (8.25 bits) it is
3.7e-4 and 98.6 %, an NF4 head has 0.13 and 77 %. The row's scale is near enough, and is applied once per result instead
of once per block. `pytest -s tests/formats/int8/test_int8.py -k real` prints all three.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.int8 import kernel as int8_kernel
from localq.formats.int8.kernel import COLUMNS, Int8Operand
from localq.formats.linear import PackedLinear
from localq.formats.samples import Random
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES

LARGEST = 127
ELEMENTS_AT_A_TIME = 2**23  # quantized together, so that f32 copies of a head of 128,256 rows stay small: 32 MiB


@dataclass(frozen=True)
class Packed:
    """codes i8 [out, in], scales f32 [out]: see the module."""

    codes: Tensor
    scales: Tensor


def quantize(weight: Tensor, device: torch.device | None = None) -> Packed:
    """weight [out, in] of any float dtype -> codes and scales on its device, or on `device`, some rows at a time.

    Raises ValueError for in % 16 != 0.
    A row that holds infinity or NaN has no scale: its scale becomes NaN, and so do its products, as in 16 bits.
    """
    out, columns = weight.shape
    if columns % COLUMNS:
        raise ValueError(f"quantize: weight has {columns} columns, must be a multiple of {COLUMNS}")
    device = device or weight.device
    codes = torch.empty(out, columns, dtype=torch.int8, device=device)
    scales = torch.empty(out, dtype=torch.float32, device=device)
    rows = max(1, ELEMENTS_AT_A_TIME // columns)
    for first in range(0, out, rows):
        part = slice(first, first + rows)
        wide = weight[part].to(device).float()
        largest = wide.abs().amax(1)
        scale = torch.where(largest.isfinite(), largest / LARGEST, torch.nan)
        quotient = (wide / scale.unsqueeze(1)).nan_to_num(0.0, 0.0, 0.0)  # 0/0 in a row of zeros
        codes[part], scales[part] = quotient.round().clamp(-LARGEST, LARGEST).to(torch.int8), scale
    return Packed(codes, scales)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain."""
    return quantize(Random(seed, device).normal(*shape, deviation=shape[1] ** -0.5, dtype=torch.float32))


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weights in `dtype` -> [out, in]: the definition of the format."""
    return (packed.codes.float() * packed.scales.unsqueeze(1)).to(dtype)


def bytes(out: int, columns: int) -> int:
    """Device bytes of one matrix [out, columns]."""
    return out * columns + 4 * out


class Linear(PackedLinear):
    """y = W x + b with W in 8 bits. x [T, in] of any float dtype -> [T, out] of the same dtype.

    CUDA: up to 8 rows of float16 or bfloat16 the kernel reads the codes; above, and on the CPU, W is dequantized into a
    temporary first (the reference).
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        """bias [out] or None."""
        super().__init__()
        self.out_features, self.in_features = packed.codes.shape
        for name, tensor in (("codes", packed.codes), ("scales", packed.scales), ("bias", bias)):
            self.register_buffer(name, tensor)

    def operand(self) -> Int8Operand:
        """The tensors as they are."""
        return Int8Operand(self.codes, self.scales, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if x.is_cuda and x.dtype in HALF_TYPES and x.shape[0] <= gemv.ROWS:
            return int8_kernel.int8_gemv(x, [self.operand()])
        return F.linear(x, dequantize(Packed(self.codes, self.scales), x.dtype), self.bias)
