"""Formats with codebooks for the self-test (`selftest_checks.py`), and what is checked of their kernels.

Matrices are random, small, of odd sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from localq.engine.selftest.compare import COLUMNS, HALF, OUT, near_gated, near_product, normal, same
from localq.formats.codebooks import (
    aqlm,
    dequantize_kernel,
    gather_kernel,
    lookup_kernel,
    rotation,
    unpack_kernel,
    vq2,
    vq2_codec,
)
from localq.formats.codebooks.gather_kernel import GatherOperand
from localq.formats.codebooks.linear import VqLinear
from localq.formats.codebooks.lookup_kernel import VqOperand
from localq.formats.codebooks.unpack_kernel import CodeSet
from localq.formats.vptq import codec as vptq_codec
from localq.formats.vptq import kernel as vptq_kernel
from localq.formats.vptq.kernel import VptqOperand
from localq.kernels.gemv import Norm

LAYOUTS = ((1, 4096, 1, 8), (1, 512, 1, 16), (2, 256, 1, 8), (3, 16, 2, 8))  # books, entries, rows and columns of AQLM
VQ2_BOOKS = ((4, 16), (16, 32))  # stride, length
VQ_SCHEMES = ("vq2", "2x8", "1x8")
TURNED_COLUMNS = (48, 1536, 8192)
TILED_SCHEMES = ("vq2", "2x8", "s4l16")
VPTQ_SCHEMES = ((8, 1024, 0), (8, 256, 16), (16, 512, 256))  # vector length, centroids, residual ones


def _integers(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _normal(*shape: int, seed: int) -> Tensor:
    return normal(*shape, seed=seed).to(HALF)


def aqlm_packed(layout: tuple[int, int, int, int], out: int, columns: int, seed: int = 1) -> aqlm.Packed:
    """On the CPU; codes of 16 bits where 8 cannot count to the entries."""
    books, entries, out_group, in_group = layout
    wide = entries > 256
    codes = _integers(2**16 if wide else 2**8, out // out_group, columns // in_group, books, seed=seed)
    codebooks, scales = _normal(*layout, seed=seed + 1), 1 + 0.1 * _normal(out // out_group, 1, 1, 1, seed=seed + 2)
    return aqlm.Packed(codes.to(torch.int16 if wide else torch.int8), codebooks, scales)


def gather_matrix(packed: aqlm.Packed, device: torch.device) -> tuple[GatherOperand, Tensor]:
    """As `gather_gemv` takes it on the device, and the weights that it multiplies: f32, their products not rounded."""
    moved = packed.to(device)
    unscaled = aqlm.dequantize(replace(packed, scales=torch.ones_like(packed.scales)), torch.float32)
    return GatherOperand(moved.codes, moved.codebooks, moved.scales), unscaled * packed.scales.view(-1, 1).float()


def vq2_packed(out: int, columns: int, seed: int = 1, number: int = 2) -> vq2_codec.Packed:
    """So many of `VQ2_BOOKS`, on the CPU."""
    books = tuple(
        (_integers(256, out, columns // stride, seed=seed + stride).to(torch.uint8), _normal(256, length, seed=length))
        for stride, length in VQ2_BOOKS[:number]
    )
    return vq2_codec.Packed(books, 1 + 0.1 * _normal(out, seed=seed), None, (out, columns))


def tiled_linear(
    scheme: str, out: int, columns: int, device: torch.device, seed: int = 1
) -> tuple[VqLinear, Callable[[torch.dtype], Tensor]]:
    """On the device with its codes in tiles, and its weights of a type, by the definition; `out` is no multiple of 16,
    so that the codes stay as they are beside the tiles."""
    if "x" in scheme:
        coded = aqlm_packed((int(scheme[0]), 256, 1, 8), out, columns, seed)
        return aqlm.Linear(coded.to(device)).put_into_tiles(), partial(aqlm.dequantize, coded)
    packed = vq2_packed(out, columns, seed, 1 if scheme == "s4l16" else 2)
    return vq2.Linear(packed.to(device)).put_into_tiles(), partial(vq2_codec.dequantize, packed)


def vq_matrix(scheme: str, out: int, columns: int, device: torch.device, seed: int) -> tuple[VqOperand, Tensor]:
    """As `vq_gemv` takes it on the device, and its weights f32."""
    linear, definition = tiled_linear(scheme, out, columns, device, seed)
    assert linear.tiles is not None  # a layout that the kernel reads
    return linear.tiles, definition(torch.float32)


def vptq_packed(scheme: tuple[int, int, int], out: int, columns: int, seed: int = 1) -> vptq_codec.Packed:
    """Packed indices, one group, a permutation and a norm, on the CPU."""
    length, count, residuals = scheme
    bits = vptq_codec.index_bits(count) + (vptq_codec.index_bits(residuals) if residuals else 0)
    words = _integers(2**32, 1, -(-out // length), vptq_codec.words_of(columns, bits), seed=seed)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    return vptq_codec.Packed(
        (words - 2**31).to(torch.int32), _normal(1, count, length, seed=seed + 1), None,
        _normal(1, residuals, length, seed=seed + 2) / 4 if residuals else None, None, None, order.to(torch.int16),
        1 + 0.1 * _normal(columns, seed=seed + 3), 0.1 * _normal(columns, seed=seed + 4), (out, columns),
    )  # fmt: skip


def vptq_matrix(packed: vptq_codec.Packed, device: torch.device) -> VptqOperand:
    """As the kernels take it on the device."""
    moved = packed.to(device)
    return VptqOperand.of(moved)


def check_additive_dequantize(device: torch.device) -> None:
    """AQLM in four layouts, and vq2 with two books, to each type."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for layout in LAYOUTS:
            packed = aqlm_packed(layout, 82, 144)
            moved, (number, entries, rows, columns) = packed.to(device), layout
            codes = CodeSet(moved.codes, moved.codebooks.view(number, entries, rows * columns), columns)
            out = torch.full((82, 144), torch.nan, dtype=dtype, device=device)
            unpack_kernel.additive_dequantize([codes], moved.scales, 0, out, out_group=rows, rounded=True)
            same(out, aqlm.dequantize(packed, dtype))
        two = vq2_packed(83, 144)
        sets = [CodeSet(codes[..., None], book[None], 144 // codes.shape[1]) for codes, book in two.to(device).books]
        out = torch.full((83, 144), torch.nan, dtype=dtype, device=device)
        unpack_kernel.additive_dequantize(sets, two.scales.to(device), 0, out, rounded=False)
        same(out, vq2_codec.dequantize(two, dtype))


def check_vptq_dequantize(device: torch.device) -> None:
    """Every scheme, to each type, bit for bit."""
    for scheme in VPTQ_SCHEMES:
        packed = vptq_packed(scheme, 83, 328)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            out = torch.full((83, 328), torch.nan, dtype=dtype, device=device)
            vptq_kernel.vptq_dequantize(vptq_matrix(packed, device), 0, out)
            same(out, vptq_codec.dequantize(packed, dtype))


def _fused(product: Callable[..., Tensor], norm: Norm, x: Tensor) -> Tensor:
    return product(x, norm=norm)


def check_gather_gemv(device: torch.device) -> None:
    """1 and 8 rows, and a gated pair behind a norm."""
    x = normal(8, COLUMNS).to(HALF)
    for layout in LAYOUTS[:2]:
        pair = [gather_matrix(aqlm_packed(layout, OUT, COLUMNS, seed), device) for seed in (1, 5)]
        for rows in (1, 8):
            near_product(gather_kernel.gather_gemv(x[:rows].to(device), [pair[0][0]]), x[:rows], pair[0][1])
        both = [matrix for matrix, _ in pair]
        run = partial(_fused, partial(gather_kernel.gather_gemv, operands=both, activation="silu"))
        near_gated(run, x, pair[0][1], pair[1][1], device)


def check_vptq_gemv(device: torch.device) -> None:
    """1 and 8 rows, and a gated pair behind a norm."""
    x = normal(8, COLUMNS).to(HALF)
    for scheme in VPTQ_SCHEMES:
        pair = [vptq_packed(scheme, OUT, COLUMNS, seed) for seed in (1, 5)]
        both = [vptq_matrix(packed, device) for packed in pair]
        gate, up = (vptq_codec.dequantize(packed, torch.float32) for packed in pair)
        for rows in (1, 8):
            near_product(vptq_kernel.vptq_gemv(x[:rows].to(device), both[:1]), x[:rows], gate)
        run = partial(_fused, partial(vptq_kernel.vptq_gemv, operands=both, activation="silu"))
        near_gated(run, x, gate, up, device)


def check_gather_roof(device: torch.device) -> None:
    """An even number of equal words cancels out in every sum."""
    table = torch.full((2**14,), 0x5A, dtype=torch.uint8, device=device)
    sums = torch.full((512,), -1, dtype=torch.int32, device=device)
    for step in gather_kernel.ROOF_STEPS:
        same(gather_kernel.gather_roof(table, step, 32, sums), torch.zeros(512, dtype=torch.int32))


def check_vq_gemv(device: torch.device) -> None:
    """One and two books, of one stride and of two; x rotated in blocks of one warp and of several."""
    x = normal(8, COLUMNS).to(HALF)
    for scheme in VQ_SCHEMES:
        pair = [vq_matrix(scheme, OUT, COLUMNS, device, seed) for seed in (1, 5)]
        for rows in (1, 2, 3, 8):
            near_product(lookup_kernel.vq_gemv(x[:rows].to(device), [pair[0][0]]), x[:rows], pair[0][1])
        run = partial(
            _fused, partial(lookup_kernel.vq_gemv, operands=[matrix for matrix, _ in pair], activation="silu")
        )
        near_gated(run, x, pair[0][1], pair[1][1], device)
    for columns in TURNED_COLUMNS:
        matrix, weight = vq_matrix("vq2", OUT, columns, device, 1)
        given, signs = normal(1, columns).to(HALF), rotation.packed_signs(normal(columns, seed=2) < 0)
        turned = rotation.rotate(given, signs)
        near_product(lookup_kernel.vq_gemv(given.to(device), [replace(matrix, signs=signs.to(device))]), turned, weight)


def check_vq_dequantize(device: torch.device) -> None:
    """Books that the fast kernel reads, and others."""
    for scheme in TILED_SCHEMES:
        linear, definition = tiled_linear(scheme, 83, 304, device)
        assert linear.tiles is not None  # a layout that the kernel reads
        codebooks = [book.values for book in linear.books()]
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            out = torch.full((51, 304), torch.nan, dtype=dtype, device=device)
            dequantize_kernel.vq_dequantize(linear.tiles, codebooks, 32, out, rounded=linear.format == "AQLM")
            same(out, definition(dtype)[32:])
