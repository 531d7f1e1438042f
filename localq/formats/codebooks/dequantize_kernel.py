"""Codes in tiles to plain weights, for prefill: the matrices that `vq_gemv` multiplies. Checks, then the kernel.

Bit for bit what `formats.codebooks.vq2_codec` and `aqlm` define.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localq import kernels
from localq.formats.codebooks.lookup_kernel import BOOKS, ENTRIES, LONGEST, TILE, VqOperand, check_matrix
from localq.kernels.checks import TYPES, addresses, check, check_cuda, place

OP = "vq_dequantize"


def vq_dequantize(matrix: VqOperand, codebooks: Sequence[Tensor], first: int, out: Tensor, *, rounded: bool) -> Tensor:
    """Rows of `matrix` from `first` on, a multiple of 16, into `out` [count, in] of f16, bf16 or f32, and `out`.

    codebooks  of its books, [entries, length] of the type of the scales; at most 256 entries, a power of two, which
               codes count modulo
    rounded    sum and product are rounded to the type of the scales (AQLM), or only the f32 product to that of `out`

    Memory-bound: `vq_dequantize_bytes`. Raises ValueError by the argument's name.
    """
    if out.dim() != 2 or out.shape[1] != matrix.in_features or len(out) < 1:
        raise ValueError(f"{OP}: out has shape {tuple(out.shape)}, must be [count, {matrix.in_features}]")
    if first % TILE or not 0 <= first <= matrix.out_features - len(out):
        raise ValueError(f"{OP}: rows {first} .. {first + len(out) - 1} of {matrix.out_features}, in tiles of {TILE}")
    if not 1 <= len(matrix.books) <= BOOKS or len(codebooks) != len(matrix.books):
        raise ValueError(f"{OP}: {len(codebooks)} codebooks of {len(matrix.books)} books, must be 1 or {BOOKS}")
    check_matrix(OP, matrix, out)
    check(OP, "out", out, matrix.codes.device, tuple(TYPES), out.numel())
    for codebook in codebooks:
        entries, length = codebook.shape if codebook.dim() == 2 else (0, 0)
        if not 2 <= entries <= ENTRIES or entries & (entries - 1) or not 1 <= length <= LONGEST:
            raise ValueError(f"{OP}: a codebook has shape {tuple(codebook.shape)}, must be [2 to 256, 1 to {LONGEST}]")
        check(OP, "codebook", codebook, out.device, (matrix.scales.dtype,), entries * length)
    check_cuda(OP, "codes", matrix.codes)
    books = [
        {
            **addresses(codes=book.codes, codebook=codebook),
            "entries": codebook.shape[0],
            "length": codebook.shape[1],
            "stride": book.stride,
            "before": book.before,
            "tile_positions": book.tile_positions,
        }
        for book, codebook in zip(matrix.books, codebooks, strict=True)
    ]
    kernels.module().vq_dequantize(
        books=books,
        scales=matrix.scales.data_ptr(),
        out_features=matrix.out_features,
        in_features=matrix.in_features,
        rounded=rounded,
        stored=TYPES[matrix.scales.dtype],
        out=out.data_ptr(),
        type=TYPES[out.dtype],
        row_begin=first,
        row_count=len(out),
        **place(out),
    )
    return out


def vq_dequantize_bytes(out: int, columns: int, strides: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that `vq_dequantize` must move: codes and scales once, the weights once; the codebooks are left out."""
    return sum(out * (columns // stride) for stride in strides) + 2 * out + dtype.itemsize * out * columns
