"""Matrices of the formats with codebooks for the self-test (`selftest_checks.py`): random, small, of odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from localq.kernels.gather import GatherMatrix
from localq.kernels.unpack import VptqMatrix
from localq.kernels.vq import VqMatrix
from localq.quant import aqlm, vptq_codec, vq2, vq2_codec
from localq.quant.vq_linear import VqLinear

HALF = torch.float16
LAYOUTS = ((1, 4096, 1, 8), (1, 512, 1, 16), (2, 256, 1, 8), (3, 16, 2, 8))  # books, entries, rows and columns of AQLM
VQ2_BOOKS = ((4, 16), (16, 32))  # stride, length
VQ_SCHEMES = ("vq2", "2x8", "1x8")
TILED_SCHEMES = ("vq2", "2x8", "s4l16")
VPTQ_SCHEMES = ((8, 1024, 0), (8, 256, 16), (16, 512, 256))  # vector length, centroids, residual ones


def _integers(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def aqlm_packed(layout: tuple[int, int, int, int], out: int, columns: int, seed: int = 1) -> aqlm.Packed:
    """On the CPU; codes of 16 bits where 8 cannot count to the entries."""
    books, entries, out_group, in_group = layout
    wide = entries > 256
    codes = _integers(2**16 if wide else 2**8, out // out_group, columns // in_group, books, seed=seed)
    codebooks, scales = _normal(*layout, seed=seed + 1), 1 + 0.1 * _normal(out // out_group, 1, 1, 1, seed=seed + 2)
    return aqlm.Packed(codes.to(torch.int16 if wide else torch.int8), codebooks, scales)


def gather_matrix(packed: aqlm.Packed, device: torch.device) -> tuple[GatherMatrix, Tensor]:
    """As `gather_gemv` takes it on the device, and the weights that it multiplies: f32, their products not rounded."""
    moved = packed.to(device)
    unscaled = aqlm.dequantize(replace(packed, scales=torch.ones_like(packed.scales)), torch.float32)
    return GatherMatrix(moved.codes, moved.codebooks, moved.scales), unscaled * packed.scales.view(-1, 1).float()


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


def vq_matrix(scheme: str, out: int, columns: int, device: torch.device, seed: int) -> tuple[VqMatrix, Tensor]:
    """As `vq_gemv` takes it on the device, and its weights f32."""
    linear, definition = tiled_linear(scheme, out, columns, device, seed)
    assert linear.matrix is not None  # a layout that the kernel reads
    return linear.matrix, definition(torch.float32)


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


def vptq_matrix(packed: vptq_codec.Packed, device: torch.device) -> VptqMatrix:
    """As the kernels take it on the device."""
    moved = packed.to(device)
    return VptqMatrix(**{each.name: getattr(moved, each.name) for each in fields(moved)})
