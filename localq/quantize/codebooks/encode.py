"""Codes, codebooks and scales for matrices that read the same input and share their codebooks.

`search_codes` searches the codes of all rows by blocks of columns; each block receives the errors of the blocks before
it (`formats/codebooks/search_kernel.py`). `fit_codebooks` then finds, for these codes, the codebooks and scales with
the least loss trace(E H E^T). Both repeat for `Effort.rounds`; the best result is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.formats.codebooks.search_kernel import Codebook, vq_search
from localq.formats.codebooks.vq2 import Packed
from localq.quantize.codebooks.refine import decode, fit_codebooks
from localq.quantize.model.linear_algebra import pieces
from localq.quantize.model.statistics import Factor, damp_in_place, factor
from localq.quantize.settings import Effort, OnStage, ignore_stage


@dataclass(frozen=True)
class EncodedMatrices:
    """Matrices in codes of shared codebooks.

    codes   of each codebook, u8 [rows, positions]
    books, scales [rows, 1]  f32, with values that 16 bits hold
    loss    trace(E H E^T) / trace(W H W^T), without damping
    """

    codes: tuple[Tensor, ...]
    books: tuple[Codebook, ...]
    scales: Tensor
    loss: float

    def matrices(self, rows: Sequence[int], signs: Tensor | None, columns: int) -> list[Packed]:
        """Split into matrices of `rows` rows each, on the CPU; they share their codebook tensors."""
        codebooks = [book.codewords.half().cpu() for book in self.books]
        codes, scales = [each.cpu() for each in self.codes], self.scales.half().flatten().cpu()
        found, begin = [], 0
        for count in rows:
            own = slice(begin, begin + count)
            pairs = tuple((each[own].clone(), book) for each, book in zip(codes, codebooks, strict=True))
            found.append(Packed(pairs, scales[own].clone(), signs, (count, columns)))
            begin += count
        return found


def encode(
    weight: Tensor, metric: Tensor, books: Sequence[Codebook], effort: Effort, on_stage: OnStage = ignore_stage
) -> EncodedMatrices:
    """Encode weight f32 [rows, in] by metric f32 [in, in], starting from `books`; all on one device.

    in is a multiple of 16. Memory beside the operands: one matrix [in, in], and pieces of the weight.
    """
    on_stage("search")
    with damp_in_place(metric, effort.damping):
        found: Factor | None = factor(metric, min(book.stride for book in books))
    scales = _positive(weight.square().mean(1, keepdim=True).sqrt())
    whole = _energy(weight, metric).clamp_min(1e-30)
    best: EncodedMatrices | None = None
    for number in range(effort.rounds):
        assert found is not None  # freed after the last round
        codes = search_codes(weight, scales, found, books, effort)
        found = found if number + 1 < effort.rounds else None
        on_stage("codebooks")
        with damp_in_place(metric, effort.damping):
            books = fit_codebooks(weight, metric, codes, books, scales, effort.steps)
            books = [Codebook(book.stride, _sixteen(book.codewords)) for book in books]
            scales = _positive(_fit_scales(weight, codes, books, metric, scales))
        loss = float(_loss(weight, codes, books, metric, scales) / whole)
        if best is None or loss < best.loss:
            best = EncodedMatrices(tuple(codes), tuple(books), scales, loss)
        on_stage("search" if found else "codebooks")
    assert best is not None  # there is at least one round
    return best


def search_codes(
    weight: Tensor, scales: Tensor, found: Factor, books: Sequence[Codebook], effort: Effort
) -> list[Tensor]:
    """Search codes u8 [rows, positions] of each codebook for weight f32 [rows, in] with row scales f32 [rows, 1]."""
    rows, columns = weight.shape
    cuts = pieces(rows, columns, 2)  # a row is a block of threads: fewer rows would leave a large GPU idle
    parts = [_search_scaled(weight[cut] / scales[cut], found, books, effort) for cut in cuts]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def _search_scaled(left: Tensor, found: Factor, books: Sequence[Codebook], effort: Effort) -> list[Tensor]:
    """`search_codes` for scaled rows, which are overwritten."""
    rows, columns = left.shape
    step = found.white.shape[1]
    tails = torch.zeros(rows, max(book.length for book in books), device=left.device)
    blocks = []
    for begin in range(0, columns, effort.columns):
        end = min(columns, begin + effort.columns)
        white, feedback = found.white[begin // step : end // step], found.feedback[begin:end]
        codes, errors = vq_search(left[:, begin:end], feedback[:, begin:end], white, books, tails, effort.beam)
        left[:, end:].addmm_(errors, feedback[:, end:], alpha=-1)
        blocks.append(codes)
    return [torch.cat(parts, 1) for parts in zip(*blocks, strict=True)]


def _fit_scales(
    weight: Tensor, codes: Sequence[Tensor], books: Sequence[Codebook], metric: Tensor, before: Tensor
) -> Tensor:
    """Fit row scales f32 [rows, 1] by least squares; `before` where the fit is not positive."""
    found = []
    for rows in pieces(*weight.shape):
        plain = decode([each[rows] for each in codes], books, weight.shape[1])
        seen = plain @ metric
        size = (plain * seen).sum(1, keepdim=True).clamp_min(1e-20)
        found.append((seen.mul_(weight[rows])).sum(1, keepdim=True) / size)
    scales = torch.cat(found)
    return torch.where(scales > 0, scales, before)


def _loss(weight: Tensor, codes: Sequence[Tensor], books: Sequence[Codebook], metric: Tensor, scales: Tensor) -> Tensor:
    """Return trace(E H E^T)."""
    lost = torch.zeros((), device=weight.device)
    for rows in pieces(*weight.shape):
        error = decode([each[rows] for each in codes], books, weight.shape[1]).mul_(scales[rows])
        lost += _energy(torch.sub(weight[rows], error, out=error), metric)
    return lost


def _energy(matrix: Tensor, metric: Tensor) -> Tensor:
    """Return trace(M H M^T)."""
    parts = [matrix[rows] for rows in pieces(*matrix.shape)]
    return torch.stack([((part @ metric).mul_(part)).sum() for part in parts]).sum()


def _positive(scales: Tensor) -> Tensor:
    """Round as `_sixteen`, to at least the smallest positive f16: rows are divided by the scales."""
    return _sixteen(scales.clamp_min(2**-24))


def _sixteen(values: Tensor) -> Tensor:
    """Round to f16, clamped to its range."""
    return values.clamp(-60_000, 60_000).half().float()
