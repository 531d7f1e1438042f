"""4-bit weights with 16 values a row for the self-test (`selftest_checks.py`), and what is checked of their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.selftest_bounds import HALF, near_gated, near_product, normal, same
from localq.kernels import rowlut
from localq.kernels.gemv import Norm
from localq.kernels.rowlut import RowLutMatrix
from localq.quant import squeezellm

OUT, COLUMNS = 83, 1632  # tiles of 16 rows and a rest; steps of 128 columns and a rest


def _made(device: torch.device, seed: int) -> tuple[RowLutMatrix, Tensor]:
    """A matrix of random codes and values on the device, and its weights f32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (OUT, COLUMNS // 2), dtype=torch.uint8, generator=generator)
    packed = squeezellm.Packed(codes, torch.randn(OUT, 16, generator=generator).to(HALF))
    return RowLutMatrix(codes.to(device), packed.table.to(device)), squeezellm.dequantize(packed, torch.float32)


def gemv(device: torch.device) -> None:
    """Both kernels, of few rows and of up to 8, in both types, and a gated pair behind a norm."""
    wide = normal(8, COLUMNS)
    (matrix, weight), (up, up_weight) = (_made(device, seed) for seed in (1, 2))
    for x in (wide.to(HALF), wide.bfloat16()):
        for rows in (1, 2, 3, 8):
            out = torch.full((rows, OUT), torch.nan, device=device)
            near_product(rowlut.rowlut_gemv(x[:rows].to(device), [matrix], out=out), x[:rows], weight)

    def gated(norm: Norm, given: Tensor) -> Tensor:
        return rowlut.rowlut_gemv(given, [matrix, up], norm=norm, activation="silu")

    near_gated(gated, wide.to(HALF), weight, up_weight, device)


def dequantize(device: torch.device) -> None:
    """To each type, bit for bit."""
    matrix, weight = _made(device, 3)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        out = torch.full(weight.shape, torch.nan, dtype=dtype, device=device)
        same(rowlut.rowlut_dequantize(matrix, 0, out), weight.to(dtype))
