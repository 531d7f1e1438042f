"""4-bit weights with 16 values a row for the self-test (`selftest_checks.py`), and what is checked of their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.selftest.compare import HALF, near_gated, near_product, normal, same
from localq.formats import squeezellm
from localq.formats.squeezellm import kernel as squeezellm_kernel
from localq.formats.squeezellm.kernel import RowLutOperand
from localq.kernels.gemv import Norm

# Tiles of 16 rows and a rest, steps of 128 columns and a rest: codes row by row. Without such rests: codes in tiles.
SHAPES = ((83, 1632), (88, 1664))


def _made(device: torch.device, shape: tuple[int, int], seed: int) -> tuple[RowLutOperand, Tensor]:
    """A matrix of random codes and values on the device, in tiles where it can be, and its weights f32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator)
    packed = squeezellm.Packed(codes, torch.randn(shape[0], 16, generator=generator).to(HALF))
    weight = squeezellm.dequantize(packed, torch.float32)
    matrix = squeezellm.Linear(packed).tile_().to(device).operand()
    assert matrix is not None  # whole loads
    return matrix, weight


def gemv(device: torch.device) -> None:
    """Of few rows and of up to 8, in both types, and a gated pair behind a norm; codes in both orders."""
    for shape in SHAPES:
        wide = normal(8, shape[1])
        (matrix, weight), (up, up_weight) = (_made(device, shape, seed) for seed in (1, 2))
        for x in (wide.to(HALF), wide.bfloat16()):
            for rows in (1, 2, 3, 8):
                out = torch.full((rows, shape[0]), torch.nan, device=device)
                near_product(squeezellm_kernel.rowlut_gemv(x[:rows].to(device), [matrix], out=out), x[:rows], weight)

        def gated(norm: Norm, given: Tensor, pair: tuple[RowLutOperand, ...] = (matrix, up)) -> Tensor:
            return squeezellm_kernel.rowlut_gemv(given, pair, norm=norm, activation="silu")

        near_gated(gated, wide.to(HALF), weight, up_weight, device)


def dequantize(device: torch.device) -> None:
    """To each type, bit for bit; codes in both orders."""
    for shape in SHAPES:
        matrix, weight = _made(device, shape, 3)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            out = torch.full(weight.shape, torch.nan, dtype=dtype, device=device)
            same(squeezellm_kernel.rowlut_dequantize(matrix, 0, out), weight.to(dtype))
