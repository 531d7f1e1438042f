"""Matrices in binary codes for the self-test (`selftest_checks.py`), and what is checked of their kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.engine.selftest.compare import HALF, near_gated, near_product, normal, same
from localq.formats import bcq as bcq_format
from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.bcq.kernel import BcqOperand
from localq.kernels.gemv import Norm

OUT, COLUMNS = 83, 1312  # tiles of 16 rows and a rest; a whole block of 1,024 columns and a rest
KINDS = ((1, 0, False), (2, 32, True), (3, 128, False), (5, 64, True))  # planes, columns of a group, zero points


def packed(planes: int, group: int, zero_point: bool, seed: int = 1) -> bcq_format.Packed:
    """Random signs, scales of both signs; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (OUT, planes, COLUMNS // 8), dtype=torch.uint8, generator=generator)
    scales = torch.randn(OUT, planes + zero_point, -(-COLUMNS // (group or COLUMNS)), generator=generator)
    return bcq_format.Packed(codes, scales.to(HALF))


def on(device: torch.device, of: bcq_format.Packed) -> BcqOperand:
    """As the kernels take it; rows that fill no tile leave `of` as it is."""
    matrix = bcq_format.Linear(of.to(device)).put_into_tiles().operand()
    assert matrix is not None  # put_into_tiles makes it
    return matrix


def check_products(device: torch.device) -> None:
    """Groups of every kind, every kernel of few rows, and a gated pair with its norm."""
    x = normal(8, COLUMNS, seed=2).to(HALF)
    for kind in KINDS:
        pair = [packed(*kind, seed) for seed in (1, 5)]
        both = [on(device, each) for each in pair]
        gate, up = (bcq_format.dequantize(each, torch.float32) for each in pair)
        for rows in (1, 2, 3, 8):
            near_product(bcq_kernel.bcq_gemv(x[:rows].to(device), both[:1]), x[:rows], gate)
        near_gated(_gated(both), x, gate, up, device)


def _gated(both: list[BcqOperand]) -> Callable[[Norm, Tensor], Tensor]:
    return lambda norm, x: bcq_kernel.bcq_gemv(x, both, norm=norm, activation="silu")


def check_weights(device: torch.device) -> None:
    """From the middle on, bit for bit."""
    for kind in KINDS:
        of = packed(*kind)
        matrix = on(device, of)
        for dtype in (torch.float16, torch.bfloat16):
            out = torch.full((OUT - 32, COLUMNS), torch.nan, dtype=dtype, device=device)
            same(bcq_kernel.bcq_dequantize(matrix, 32, out), bcq_format.dequantize(of, dtype)[32:])
