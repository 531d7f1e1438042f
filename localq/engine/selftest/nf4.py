"""NF4 for the self-test (`selftest_checks.py`): random matrices, and what is checked of their kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from localq.engine.selftest.compare import COLUMNS, HALF, OUT, near_gated, near_product, normal, same
from localq.formats import nf4 as nf4_format
from localq.formats.nf4 import Packed
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.nf4.kernel import Nf4Operand


def _matrix(device: torch.device, tiled: bool, seed: int = 1) -> tuple[Nf4Operand, Tensor]:
    """A matrix of random codes and scales on the device, and its weights f32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    blocks = OUT * COLUMNS // nf4_kernel.BLOCK
    codes = torch.randint(256, (OUT, COLUMNS // 2), dtype=torch.uint8, generator=generator)
    absmax = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
    nested_absmax = 0.5 + torch.rand(-(-blocks // nf4_kernel.NESTED_BLOCK), generator=generator)
    nested_map, offset = nf4_format.dynamic_map(), torch.tensor(1.25)
    packed = Packed(codes, absmax, nested_absmax, nested_map, offset, (OUT, COLUMNS), torch.float32)
    if tiled:
        codes, absmax = nf4_tiles.tile(codes, absmax, packed.shape)
    matrix = Nf4Operand(
        codes.to(device), absmax.to(device), nested_absmax.to(device), nested_map.to(device), offset.item(),
        nf4_format.CODE_MAP.to(device), OUT, COLUMNS, tiled,
    )  # fmt: skip
    return matrix, nf4_format.dequantize(packed, torch.float32)


def dequantize(device: torch.device) -> None:
    """To each type, bit for bit."""
    for tiled in (False, True):
        matrix, weight = _matrix(device, tiled)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            same(nf4_kernel.nf4_dequantize(matrix, dtype), weight.to(dtype))


def gemv(device: torch.device) -> None:
    """1, 3 and 8 rows, a residual, and a gated pair behind a norm."""
    x = normal(8, COLUMNS).to(HALF)
    for tiled in (False, True):
        matrix, weight = _matrix(device, tiled)
        for rows in (1, 3, 8):
            near_product(nf4_kernel.nf4_gemv(x[:rows].to(device), [matrix]), x[:rows], weight)
    residual = normal(1, OUT, seed=2).to(HALF)
    got = nf4_kernel.nf4_gemv(x[:1].to(device), [matrix], residual=residual.to(device))
    near_product(got, x[:1], weight, residual)
    second, up = _matrix(device, True, seed=2)
    second = replace(second, code_map=matrix.code_map, nested_map=matrix.nested_map)  # one launch has one of each
    near_gated(
        lambda norm, x: nf4_kernel.nf4_gemv(x, [matrix, second], norm=norm, activation="silu"), x, weight, up, device
    )


def gemm(device: torch.device) -> None:
    """Rows that fill no tile."""
    x = normal(21, COLUMNS).to(HALF)
    for tiled in (False, True):
        matrix, weight = _matrix(device, tiled)
        near_product(nf4_kernel.nf4_gemm(x.to(device), matrix), x, weight)
