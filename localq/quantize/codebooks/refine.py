"""Codebooks that fit given codes best: a linear least-squares problem, solved by conjugate gradients.

The decoded matrix D(C) is linear in the codebooks C, so trace((W - s D(C)) H (W - s D(C))^T) is quadratic in them; s
are the row scales. Its gradient needs a decoding, a product with H, and the adjoint of decoding: every codeword sums
the matrix wherever it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from localq.formats.codebooks.adjoint_kernel import vq_adjoint
from localq.formats.codebooks.definition import dequantize_codes
from localq.formats.codebooks.search_kernel import ENTRIES, Codebook
from localq.formats.codebooks.unpack_kernel import CodeSet, additive_dequantize
from localq.quantize.model.linear_algebra import pieces

RIDGE = 1e-3  # of the mean diagonal, for rarely used codewords
# As a fraction of the initial squared residual: below it only rounding is left, and steps along directions in which two
# codebooks cancel each other (a constant in one, its negative in the other) would diverge.
ROUNDING = 1e-11


def fit_codebooks(
    weight: Tensor, metric: Tensor, codes: Sequence[Tensor], books: Sequence[Codebook], scales: Tensor, steps: int
) -> list[Codebook]:
    """Improve `books` by `steps` steps; weight f32 [rows, in], scales f32 [rows, 1]."""
    squares = scales.square()
    heights = [_uses(each, squares) * metric.diagonal().mean() for each in codes]
    weights = [height + RIDGE * height.mean() for height in heights]  # of the preconditioner

    def product(values: list[Tensor]) -> list[Tensor]:
        held = [Codebook(book.stride, value) for book, value in zip(books, values, strict=True)]

        def rows_of(rows: slice) -> Tensor:
            return decode([each[rows] for each in codes], held, weight.shape[1]).mul_(squares[rows]) @ metric

        return _adjoint_by_rows(rows_of, weight.shape, codes, books)

    values = [book.codewords for book in books]
    aim = _adjoint_by_rows(lambda rows: (weight[rows] * scales[rows]) @ metric, weight.shape, codes, books)
    rest = [wanted - got for wanted, got in zip(aim, product(values), strict=True)]
    scaled = [each / height for each, height in zip(rest, weights, strict=True)]
    way, size = scaled, _dot(rest, scaled)
    least = ROUNDING * size
    for _ in range(steps):
        turned = product(way)
        along = _dot(way, turned)
        if not bool((along > 0) & (size > least)):  # converged
            break
        pace = size / along
        values = [value + pace * each for value, each in zip(values, way, strict=True)]
        rest = [each - pace * other for each, other in zip(rest, turned, strict=True)]
        scaled = [each / height for each, height in zip(rest, weights, strict=True)]
        before, size = size, _dot(rest, scaled)
        way = [each + (size / before) * old for each, old in zip(scaled, way, strict=True)]
    return [Codebook(book.stride, value) for book, value in zip(books, values, strict=True)]


def decode(codes: Sequence[Tensor], books: Sequence[Codebook], columns: int) -> Tensor:
    """Decode to f32 [rows, columns], without scales; a GPU kernel gives the same bits, for at most two codebooks."""
    if codes[0].is_cuda:
        sets = [
            CodeSet(part[:, :, None].contiguous(), book.codewords[None].contiguous(), book.stride)
            for part, book in zip(codes, books, strict=True)
        ]
        ones = torch.ones(len(codes[0]), device=codes[0].device)
        return additive_dequantize(sets, ones, 0, torch.empty(len(ones), columns, device=ones.device), rounded=False)
    total: Tensor | None = None
    for part, book in zip(codes, books, strict=True):
        total = dequantize_codes(part[:, :, None], book.codewords[None], book.stride, book.length, columns, total)
    assert total is not None  # there is at least one book
    return total


def adjoint(matrix: Tensor, codes: Sequence[Tensor], books: Sequence[Codebook]) -> list[Tensor]:
    """Apply the adjoint of decoding: matrix f32 [rows, in] -> f32 [256, length] of each codebook."""
    return _adjoint_by_rows(lambda rows: matrix[rows], matrix.shape, codes, books)


def _adjoint_by_rows(
    rows_of: Callable[[slice], Tensor], shape: Sequence[int], codes: Sequence[Tensor], books: Sequence[Codebook]
) -> list[Tensor]:
    """`adjoint` for a matrix of this shape whose rows `rows_of` computes."""
    found = [torch.zeros_like(book.codewords) for book in books]
    for rows in pieces(*shape):
        part = rows_of(rows)
        for total, numbers, book in zip(found, codes, books, strict=True):
            _gather(total, part, numbers[rows], book)
    return found


def _gather(total: Tensor, matrix: Tensor, numbers: Tensor, book: Codebook) -> None:
    if matrix.is_cuda:
        total += vq_adjoint(matrix.contiguous(), numbers.contiguous(), book.stride, book.length)
        return
    rows, positions = numbers.shape
    parts = matrix.view(rows, positions, book.stride)
    for lag in range(min(book.length // book.stride, positions)):
        used = numbers[:, : positions - lag].reshape(-1).int()
        begin = lag * book.stride
        # squeeze: torch adds single numbers far faster than rows of one
        sums, added = total[:, begin : begin + book.stride], parts[:, lag:].reshape(-1, book.stride)
        sums.squeeze(1).index_add_(0, used, added.squeeze(1))


def _uses(numbers: Tensor, squares: Tensor) -> Tensor:
    """Return f32 [256, 1]: uses of each codeword, weighted by the squared row scales."""
    counts = torch.zeros(ENTRIES, 1, device=numbers.device)
    alone = Codebook(1, counts)  # a weight for each position
    for rows in pieces(*numbers.shape):
        _gather(counts, squares[rows].expand(-1, numbers.shape[1]), numbers[rows], alone)
    return counts


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([(one * other).sum() for one, other in zip(first, second, strict=True)]).sum()
