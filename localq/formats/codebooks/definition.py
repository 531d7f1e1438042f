"""Additive codebooks: every stretch of weights in a row is a sum of codewords, and codewords may overlap.

A family of formats. M codebooks hold `entries` codewords of `length` weights each; codes lie `stride` weights apart:

weight[r, j] = sum over h, and over m = 0 .. M-1, with 0 <= j - stride*h < length, of
               codebooks[m, codes[r, h, m], j - stride*h]

The terms are added one by one to an f32 zero: earlier positions h first, for each of them the codebooks in order. What
of a codeword lies beyond the end of its row is cut off. Besides codebooks, M * log2(entries) / stride bits per weight;
scales of rows are the business of each format. Codebooks of another stride or length are added afterwards, to the sum
of the first (`onto`).

stride == length   codewords lie side by side: AQLM, of which 2x8 has M = 2, entries = 256, length = 8
stride <  length   codewords overlap: a weight is the sum of ceil(length / stride) positions, fewer where a row begins:
                   vq2
"""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize_codes(
    codes: Tensor, codebooks: Tensor, stride: int, length: int, columns: int, onto: Tensor | None = None
) -> Tensor:
    """codes [rows, positions, M], codebooks [M, entries, length] -> f32 [rows, columns], on the device of the codes.

    codes      of any integer type. They count modulo `entries`, a power of two: signed storage of unsigned numbers is
               read as it is meant, and no code reads out of bounds
    positions  ceil(columns / stride)
    onto       f32 [rows, columns], contiguous, whole positions long: the terms are added to it in place, not to zeros

    The reference of all formats of the family. It takes a second result of temporaries, and 4 bytes for each code of a
    codebook. Raises ValueError for sizes that do not belong together.
    """
    _check(codes, codebooks, stride, length, columns)
    rows, positions, books = codes.shape
    if onto is None:
        onto = torch.zeros(rows, positions * stride, dtype=torch.float32, device=codes.device)
    elif onto.dtype != torch.float32 or onto.shape != (rows, positions * stride):
        raise ValueError(f"onto is {onto.dtype} {list(onto.shape)}, not float32 {[rows, positions * stride]}")
    total = onto.view(rows, positions, stride)
    for lag in reversed(range(min(-(-length // stride), positions))):  # positions from a codeword's begin to the weight
        parts = codebooks[:, :, lag * stride : (lag + 1) * stride].float()  # [M, entries, width]
        reached = total[:, lag:, : parts.shape[2]]
        for book in range(books):
            reached += _codewords(codes[:, : positions - lag, book], parts[book])
    return total.view(rows, positions * stride)[:, :columns]


def _codewords(codes: Tensor, book: Tensor) -> Tensor:
    """codes [rows, positions], book f32 [entries, width] -> f32 [rows, positions, width]."""
    indices = codes.to(torch.int32).bitwise_and_(book.shape[0] - 1)
    return book.index_select(0, indices.reshape(-1)).view(*codes.shape, book.shape[1])


def _check(codes: Tensor, codebooks: Tensor, stride: int, length: int, columns: int) -> None:
    if codes.is_floating_point() or codes.dtype == torch.bool or codes.dim() != 3:
        raise ValueError(f"codes are {codes.dtype} {list(codes.shape)}, not integers [rows, positions, codebooks]")
    if codebooks.dim() != 3 or codebooks.shape[0] != codes.shape[2] or codebooks.shape[2] != length:
        wanted = f"[{codes.shape[2]}, entries, {length}]"
        raise ValueError(f"codebooks have shape {list(codebooks.shape)}, not {wanted}")
    entries = codebooks.shape[1]
    if entries < 1 or entries & (entries - 1):
        raise ValueError(f"codebooks have {entries} entries, which is no power of two")
    if not 0 < stride <= length or codes.shape[1] != -(-columns // stride):
        why = f"do not fit {columns} columns (stride {stride}, codeword length {length})"
        raise ValueError(f"{codes.shape[1]} codes per row {why}")
