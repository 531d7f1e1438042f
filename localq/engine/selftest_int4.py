"""Matrices of 4-bit weights with a scale and a zero point a group for the self-test (`selftest_checks.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.kernels.int4 import Int4Matrix
from localq.quant import int4_codec, int4_tiles

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


def on(device: torch.device, of: int4_codec.Packed, like: Int4Matrix | None = None) -> Int4Matrix:
    """As the kernels take it; `like`: the matrix whose order it shares, as those of one launch must."""
    tiled = int4_tiles.tile(of.to(device))
    order = tiled.order if like is None else like.order
    return Int4Matrix(tiled.codes, tiled.scales, tiled.zeros, order, tiled.group)


def weight(of: int4_codec.Packed) -> Tensor:
    """f32 [out, in]"""
    return int4_codec.dequantize(of, torch.float32)
