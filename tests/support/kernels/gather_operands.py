"""Operands for the tests of the products that gather codewords: AQLM 1x16 and VPTQ, as `row_operands` has them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from localq.formats.codebooks import aqlm
from localq.formats.codebooks.gather_kernel import GatherOperand, gather_gemv
from localq.formats.vptq import codec as vptq_codec
from localq.formats.vptq.kernel import VptqOperand, vptq_gemv
from tests.support.kernels.row_operands import RowFormat, RowOperand

ENTRIES = 65_536


def integers(high: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def shorts(high: int, *shape: int, seed: int) -> torch.Tensor:
    """Numbers below `high` <= 2^16 as the bits of an i16."""
    return integers(high, *shape, seed=seed).to(torch.int32).to(torch.int16)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def aqlm_packed(
    shape: tuple[int, int], dtype: torch.dtype, seed: int, layout: tuple[int, int, int, int] = (1, ENTRIES, 1, 8)
) -> aqlm.Packed:
    """`layout`: codebooks, entries, rows and columns of a group. Every bit of a code occurs, some scales are large."""
    books, entries, out_group, in_group = layout
    codes = shorts(2**16, shape[0] // out_group, shape[1] // in_group, books, seed=seed)
    codes = codes if entries > 256 else codes.to(torch.int8)
    scales = 0.5 + torch.rand(shape[0] // out_group, 1, 1, 1, generator=torch.Generator().manual_seed(seed))
    scales[::5] *= 30
    return aqlm.Packed(codes, normal(*layout, dtype=dtype, seed=seed + 1) / 64, scales.to(dtype))


def vptq_packed(
    shape: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
    scheme: tuple[int, int, int] = (8, ENTRIES, 0),
    *,
    groups: int = 1,
    outliers: tuple[int, int, int] = (0, 0, 0),
    packed: bool = True,
    places: bool = True,
    norm: bool = True,
) -> vptq_codec.Packed:
    """`scheme`: vector length, centroids, residual ones; `outliers`: columns, vector length, centroids."""
    (length, count, residuals), (apart, outlier_len, outlier_count), (out, columns) = scheme, outliers, shape
    vectors, size = -(-out // length), (columns - apart) // groups
    bits = vptq_codec.index_bits(count) + (vptq_codec.index_bits(residuals) if residuals else 0)
    words = integers(2**32, groups, vectors, vptq_codec.words_of(size, bits), seed=seed) - 2**31
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    split = not packed and residuals
    return vptq_codec.Packed(
        words.to(torch.int32) if packed else shorts(count, groups, vectors, size, seed=seed),
        normal(groups, count, length, dtype=dtype, seed=seed + 1) / 64,
        shorts(residuals, groups, vectors, size, seed=seed + 2) if split else None,
        normal(groups, residuals, length, dtype=dtype, seed=seed + 3) / 256 if residuals else None,
        shorts(outlier_count, -(-out // outlier_len), apart, seed=seed + 4) if apart else None,
        normal(outlier_count, outlier_len, dtype=dtype, seed=seed + 5) / 16 if apart else None,
        (order - (order >= 2**15) * 2**16).to(torch.int16) if places else None,
        1 + normal(columns, dtype=dtype, seed=seed + 6) / 8 if norm else None,
        normal(columns, dtype=dtype, seed=seed + 7) / 64 if norm else None,
        shape,
    )


def gather_matrix(packed: aqlm.Packed) -> GatherOperand:
    return GatherOperand(packed.codes, packed.codebooks, packed.scales)


def unrounded(packed: aqlm.Packed) -> torch.Tensor:
    """The weights that `gather_gemv` multiplies, f32 [out, in]: codeword * scale, as f32 has it."""
    plain = aqlm.dequantize(replace(packed, scales=torch.ones_like(packed.scales)), torch.float32)
    return plain * packed.scales.view(-1, 1).float()


def vptq_matrix(packed: vptq_codec.Packed) -> VptqOperand:
    return VptqOperand.of(packed)


def _aqlm(layout, shape, dtype, seed, device) -> RowOperand:
    packed = aqlm_packed(shape, dtype, seed, layout).to(device)
    return RowOperand(gather_matrix(packed), unrounded(packed))


def _vptq(scheme, packs, shape, dtype, seed, device) -> RowOperand:
    packed = vptq_packed(shape, dtype, seed, scheme, packed=packs, places=seed % 4 != 3, norm=seed % 5 != 4).to(device)
    return RowOperand(vptq_matrix(packed), vptq_codec.dequantize(packed, torch.float32))


AQLM = {
    "1x16g8": RowFormat(partial(_aqlm, (1, ENTRIES, 1, 8)), gather_gemv, 16),
    "1x12g8": RowFormat(partial(_aqlm, (1, 4096, 1, 8)), gather_gemv, 16),
    "1x16g16": RowFormat(partial(_aqlm, (1, ENTRIES, 1, 16)), gather_gemv, 32),
}
VPTQ = {
    "v8-k65536-0": RowFormat(partial(_vptq, (8, ENTRIES, 0), True), vptq_gemv, 16),
    "v8-k65536-256": RowFormat(partial(_vptq, (8, ENTRIES, 256), True), vptq_gemv, 16),
    "v16-k65536-0": RowFormat(partial(_vptq, (16, ENTRIES, 0), True), vptq_gemv, 16),
    "v16-k65536-65536": RowFormat(partial(_vptq, (16, ENTRIES, ENTRIES), True), vptq_gemv, 16),
    "v8-k300-37 unpacked": RowFormat(partial(_vptq, (8, 300, 37), False), vptq_gemv, 16),
}
