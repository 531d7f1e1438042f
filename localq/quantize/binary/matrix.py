"""Binary codes of one matrix (`formats/bcq`) on the second moments of its input: signs and scales by a metric.

For a matrix W f32 [rows, in] whose input has the second moments H (`model/statistics.py`), the search minimizes
trace(E H E^T), where E is W minus the decoded codes; rows are independent of each other.

1. Error feedback as in GPTQ (Frantar et al. 2023), with sums of scales in place of even steps. Column by column takes
   the nearest sum, and later columns compensate for its error. A group gets its scales when its first column is
   reached, from its weights at that point, by `bcq.solve` with columns weighted by their later cost: H = V V^T, V upper
   triangular, and an error e of column j costs (e V_jj)^2.
2. Refinement passes over all groups: the scales of a group that are best for its signs, everything else fixed (least
   squares with the metric); then each of its columns, in order, takes the sum with the least loss, everything else
   fixed. No step raises the loss, with scales as they are stored in f16.

Step 2 finds what feedback cannot: errors that earlier columns should make for later ones, and scales for signs that
were not chosen by distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.formats import bcq
from localq.formats.bcq import solve as bcq_solve
from localq.quantize.model.linear_algebra import pieces
from localq.quantize.model.statistics import damp_in_place, factor

TURNS = 2  # passes of step 2; a third one lowers the loss by about 1 % (tests/quantize/binary/test_matrix.py)
FIRST_TURNS = 5  # most iterations of `bcq.solve`; step 2 fits the scales again
DAMPING = 0.01  # of the metric, as a fraction of its mean diagonal
RUN = 128  # columns whose errors are collected before they are applied to the other columns
FINER = 8  # pieces are smaller than in general by this factor: working on rows takes `TAKEN` more bytes per weight
TAKEN = 64


@dataclass(frozen=True)
class EncodedMatrix:
    """A matrix in binary codes, and its loss: trace(E H E^T) / trace(W H W^T), without damping."""

    packed: bcq.Packed
    loss: float


def encode(weight: Tensor, metric: Tensor, maker: bcq.Maker, turns: int = TURNS) -> EncodedMatrix:
    """Encode weight f32 [rows, in], finite, by metric f32 [in, in] on the same device.

    The metric is damped in place meanwhile. Raises LocalqError (exit 8) where it is not finite.
    """
    rows, columns = weight.shape
    size = min(maker.group or columns, columns)
    cuts = [slice(first, min(first + size, columns)) for first in range(0, columns, size)]
    with damp_in_place(metric, DAMPING):
        feedback = factor(metric, 1).feedback
        parts = [_encode_rows(weight[some], maker, cuts, feedback, metric, turns) for some in _pieces(rows, columns)]
    numbers, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    packed = bcq.packed(numbers, scales, maker.planes)
    return EncodedMatrix(packed, _loss(weight, packed, metric))


def _pieces(rows: int, columns: int) -> list[slice]:
    return pieces(rows, FINER * columns)


def _encode_rows(
    weight: Tensor, maker: bcq.Maker, cuts: list[slice], feedback: Tensor, metric: Tensor, turns: int
) -> tuple[Tensor, Tensor]:
    """Encode some rows: numbers u8 [rows, in], scales f16 [rows, layers, groups]."""
    part = _Rows(weight, maker, cuts)
    part.feed(feedback)
    part.refine(metric, turns)
    return part.numbers.T, part.scales.permute(1, 2, 0)


class _Rows:
    """Some rows of a matrix, transposed, so that a column is contiguous.

    numbers  u8 [in, rows]: bit b is the sign in plane b
    scales   f16 [groups, rows, layers]
    """

    def __init__(self, weight: Tensor, maker: bcq.Maker, cuts: list[slice]) -> None:
        self._weight = weight.T.contiguous()
        self._planes, self._zero_point, self._cuts = maker.planes, maker.zero_point, cuts
        self._values = torch.zeros_like(self._weight)
        self.numbers = torch.zeros(self._weight.shape, dtype=torch.uint8, device=weight.device)
        shape = len(cuts), weight.shape[0], maker.planes + maker.zero_point
        self.scales = torch.zeros(shape, dtype=torch.float16, device=weight.device)

    def _sums(self, group: int) -> bcq_solve.Sums:
        return bcq_solve.Sums(self.scales[group].float(), self._planes)

    def feed(self, feedback: Tensor) -> None:
        """Choose codes by error feedback; feedback: the inverse of V, f32 [in, in]."""
        left, pivots = self._weight.clone(), feedback.diagonal().clone()
        for group, cut in enumerate(self._cuts):
            costs = pivots[cut].square().reciprocal()
            _, self.scales[group] = bcq_solve.solve(left[cut].T, self._planes, self._zero_point, costs, FIRST_TURNS)
            sums = self._sums(group)
            for run in _runs(cut):
                some, errors, index = left[run], torch.empty_like(left[run]), self._index(run)
                within = feedback[run, run]
                for at, pivot in enumerate(pivots[run]):
                    torch.searchsorted(sums.bounds, some[at, :, None], out=index[at])
                    torch.sub(some[at], sums.sums.gather(1, index[at])[:, 0], out=errors[at])
                    errors[at].div_(pivot)
                    some[at + 1 :].addr_(within[at, at + 1 :], errors[at], alpha=-1)
                self._take(run, sums, index)
                left[run.stop :].addmm_(feedback[run, run.stop :].T, errors, alpha=-1)

    def _index(self, run: slice) -> Tensor:
        """Allocate the rank of the sum that each weight takes: i64 [columns, rows, 1]."""
        return self.numbers.new_empty(run.stop - run.start, self.numbers.shape[1], 1, dtype=torch.int64)

    def _take(self, run: slice, sums: bcq_solve.Sums, index: Tensor) -> None:
        """Set numbers and values of some columns from `index`."""
        chosen = index[..., 0].T
        self.numbers[run] = sums.order.gather(1, chosen).T.to(torch.uint8)
        self._values[run] = sums.sums.gather(1, chosen).T

    def refine(self, metric: Tensor, turns: int) -> None:
        """Run refinement passes on `metric` f32 [in, in], symmetric."""
        if not turns:
            return
        slopes = metric @ (self._weight - self._values)  # H E^T
        for _ in range(turns):
            for group, cut in enumerate(self._cuts):
                self._fit(group, cut, metric, slopes)
                sums = self._sums(group)
                for run in _runs(cut):
                    self._choose(run, sums, metric, slopes)

    def _fit(self, group: int, cut: slice, metric: Tensor, slopes: Tensor) -> None:
        """Fit the scales of a group to its signs, where that lowers the loss."""
        signs = [(self.numbers[cut] >> plane & 1).float() * 2 - 1 for plane in range(self._planes)]
        signs += [torch.ones_like(signs[0])] * self._zero_point
        own, layers = metric[cut, cut], len(signs)
        system = slopes.new_empty(slopes.shape[1], layers, layers + 1, dtype=torch.float64)
        for j, sign in enumerate(signs):
            seen = own @ sign
            for k in range(j + 1):
                system[:, j, k] = system[:, k, j] = (seen * signs[k]).sum(0)
            system[:, j, -1] = (slopes[cut] * sign).sum(0)
        least = 1e-5 * system[:, 0, 0]
        step = bcq_solve.eliminated(system, least).float()
        moved = self.scales[group].float() + step
        moved = moved.clamp(-bcq_solve.LARGEST, bcq_solve.LARGEST).half()
        table = bcq_solve.sums_of(moved.float(), self._planes).T
        change = table.gather(0, self.numbers[cut].long()) - self._values[cut]
        gain = (change * (2 * slopes[cut] - own @ change)).sum(0)
        better = gain > 0
        self.scales[group] = torch.where(better[:, None], moved, self.scales[group])
        change = torch.where(better, change, 0.0)
        self._values[cut] += change
        slopes.addmm_(metric[:, cut], change, alpha=-1)

    def _choose(self, run: slice, sums: bcq_solve.Sums, metric: Tensor, slopes: Tensor) -> None:
        """Choose the best sum for each of some columns of a group."""
        some, own, index = slopes[run].clone(), metric[run, run], self._index(run)
        before = self._values[run].clone()
        for at, heavy in enumerate(own.diagonal()):
            wanted = torch.addcdiv(before[at], some[at], heavy)
            torch.searchsorted(sums.bounds, wanted[:, None], out=index[at])
            some.addr_(own[at], sums.sums.gather(1, index[at])[:, 0] - before[at], alpha=-1)
        self._take(run, sums, index)
        slopes.addmm_(metric[:, run], self._values[run] - before, alpha=-1)


def _runs(cut: slice) -> Iterator[slice]:
    for first in range(cut.start, cut.stop, RUN):
        yield slice(first, min(first + RUN, cut.stop))


def _loss(weight: Tensor, packed: bcq.Packed, metric: Tensor) -> float:
    lost = whole = 0.0
    for some in _pieces(*weight.shape):
        error = weight[some] - bcq.dequantize(packed.rows(some.start, some.stop - some.start), torch.float32)
        lost += float(((error @ metric) * error).sum())
        whole += float(((weight[some] @ metric) * weight[some]).sum())
    return lost / max(whole, 1e-30)
