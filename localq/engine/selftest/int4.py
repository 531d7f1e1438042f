"""Matrices of 4-bit weights with a scale and a zero point a group for the self-test, and what is checked of
their kernels (`selftest_checks.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localq.engine.selftest.compare import HALF, near_gated, near_product, normal, same
from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int4 import tiles as int4_tiles
from localq.formats.int4.kernel import Int4Operand
from localq.kernels.gemv import Norm

OUT = 80
KINDS = ((128, 640, False), (64, 832, True), (32, 576, False))  # columns of a group, columns, ordered by groups


def packed(group: int, columns: int, ordered: bool, seed: int = 1) -> int4_codec.Packed:
    """On the CPU: random codes and zero points, and scales that keep what comes of two products within f16."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // group
    codes = torch.randint(256, (OUT, columns // 2), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(256, (groups, OUT // 2), dtype=torch.uint8, generator=generator)
    scales = (0.005 + 0.01 * torch.rand(groups, OUT, generator=generator)).half()
    order = int4_codec.as_order(torch.randperm(columns, generator=torch.Generator().manual_seed(5)))
    return int4_codec.Packed(codes, scales, zeros, order if ordered else None, group, not ordered)


def on(device: torch.device, of: int4_codec.Packed, like: Int4Operand | None = None) -> Int4Operand:
    """As the kernels take it; `like`: the matrix whose order it shares, as those of one launch must."""
    tiled = int4_tiles.tile(of.to(device))
    order = tiled.order if like is None else like.order
    return Int4Operand(tiled.codes, tiled.scales, tiled.zeros, order, tiled.group)


def weight(of: int4_codec.Packed) -> Tensor:
    """f32 [out, in]"""
    return int4_codec.dequantize(of, torch.float32)


def check_products(device: torch.device) -> None:
    """1 and 8 rows of every kind and type, and a gated pair behind a norm."""
    for kind in KINDS:
        of, wide = packed(*kind), normal(8, kind[1])
        matrix = on(device, of)
        for x in (wide.to(HALF), wide.bfloat16()):
            for rows in (1, 8):
                out = torch.full((rows, OUT), torch.nan, device=device)
                near_product(int4_kernel.int4_gemv(x[:rows].to(device), [matrix], out=out), x[:rows], weight(of))
        other = packed(*kind, seed=2)
        near_gated(_gated([matrix, on(device, other, matrix)]), wide.to(HALF), weight(of), weight(other), device)


def _gated(pair: list[Int4Operand]) -> Callable[[Norm, Tensor], Tensor]:
    return lambda norm, x: int4_kernel.int4_gemv(x, pair, norm=norm, activation="silu")


def check_weights(device: torch.device) -> None:
    """To each type, bit for bit."""
    for kind in KINDS:
        of = replace(packed(*kind), order=None, in_order=True)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            out = torch.empty(OUT, kind[1], dtype=dtype, device=device)
            same(int4_kernel.int4_dequantize(on(device, of), 0, out), weight(of).to(dtype))
