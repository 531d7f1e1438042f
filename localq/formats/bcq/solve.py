"""From weights to binary codes: a start, then turns of least squares for scales and exact choice of signs.

The way of Xu et al., "Alternating multi-bit quantization" (ICLR 2018), which nuQmm and LUT-GEMM (Park et al., 2022)
quantize by. Every group of columns is solved by itself:

1. greedy: plane after plane, the signs of what is left, and the mean of its magnitudes; with a zero point, what is left
   begins as the weights less their mean;
2. least squares: the scales (and the zero point) that fit the signs best;
3. signs: of the 2^planes sums of scales, each weight gets the nearest;

2 and 3 in turns, as long as a group gets better, then once more 3 with the scales as they are stored, in f16. A turn
that does not lower the error of a group is not taken.

Turns end in the optimum that is next to the start, and of 3 planes and more the greedy one is next to a poor one: of
Gaussian weights in groups of 128 it leaves 0.0349, 0.0110 and 0.0037 with 3, 4 and 5 planes. So each group also starts
from sums that are as far from each other, at several sizes (`TOPS`), and keeps the best: 0.0338, 0.0095 and 0.0025.

A group's weights are sorted once. Then those that are nearest to a sum lie behind each other, and a turn needs no more
of them than their number and their total, which running totals give: its cost does not depend on the group's size.
Where columns count differently (`importance`), numbers, totals and errors are weighted.

Nothing depends on the device, on threads or on the other groups: all sums have one order (`_sum`, `_running`),
everything else is one operation per element. This is all that a matrix alone can tell; `quantize/binary/matrix.py` goes
on from here with what a text tells about the errors of columns together.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

TURNS = 15  # as published
# Where the even starts have their largest sums, in root mean squares of the group, by planes.
TOPS = ((), (), (1.7, 2.0), (2.0, 2.4), (2.3, 2.8))
CHUNK_WEIGHTS = {"cpu": 2**17, "cuda": 2**21}
LARGEST = 65504.0  # of f16
UNDETERMINED = 1e-9  # a pivot of no more than that, in parts of the group's size, is the rounding of a 0


def solve(
    weight: Tensor, planes: int, zero_point: bool, importance: Tensor | None = None, turns: int = TURNS
) -> tuple[Tensor, Tensor]:
    """weight f32 [groups, size], each row a group -> numbers u8 [groups, size], scales f16 [groups, layers].

    Bit b of a number is set where plane b has a +. The zero point, where there is one, is the last layer. Weights are
    finite.

    importance   f32 [size], of the columns of every group, none negative; None: all the same
    turns        at most, from each start
    """
    counts = None if importance is None else _counts(importance)
    numbers = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = weight.new_empty(weight.shape[0], planes + zero_point, dtype=torch.float16)
    starts = 1 + len(TOPS[planes - 1])
    rows = max(1, CHUNK_WEIGHTS.get(weight.device.type, 2**17) // (starts * weight.shape[1]))
    for first in range(0, weight.shape[0], rows):
        part = slice(first, first + rows)
        scales[part] = _best_scales(weight[part], planes, zero_point, counts, turns)
        numbers[part] = Sums(scales[part].float(), planes).nearest(weight[part])[0]
    return numbers, scales


def _counts(importance: Tensor) -> Tensor:
    """Of each column, f64 [size], so that their mean is 1; where none counts, all do."""
    wide = importance.double()
    mean = wide.mean()
    return wide / mean if bool(mean > 0) else torch.ones_like(wide)


def _best_scales(weight: Tensor, planes: int, zero_point: bool, counts: Tensor | None, turns: int) -> Tensor:
    """f16 [groups, layers], of the best start."""
    ordered = Ordered(weight, counts)
    starts = [greedy(ordered, planes, zero_point)]
    starts += [even(ordered, planes, zero_point, top) for top in TOPS[planes - 1]]
    scales, errors = turned(ordered.times(len(starts)), torch.cat(starts), planes, turns)
    best = errors.view(len(starts), -1).argmin(0)  # the first of those that are the same
    chosen = scales[best * len(weight) + torch.arange(len(weight), device=weight.device)]
    return chosen.clamp(-LARGEST, LARGEST).half()


class Ordered:
    """Weights f32 [groups, size] in order of size, what each of them counts, and running totals, f64."""

    def __init__(self, weight: Tensor, counts: Tensor | None = None) -> None:
        """counts: f64 [size], of mean 1; None: all 1."""
        self.weight, order = torch.sort(weight.contiguous(), dim=1, stable=True)
        wide = self.weight.double()
        self.counts = torch.ones_like(wide) if counts is None else counts[order]
        self._counted, self._summed = _running(self.counts), _running(self.counts * wide)
        self.squares = _sum(self.counts * wide.square())

    def times(self, count: int) -> Ordered:
        """All groups `count` times, one time after the other: so many starts take their turns at once."""
        repeated = copy.copy(self)
        for name, each in vars(self).items():
            setattr(repeated, name, each.repeat(count, *[1] * (each.dim() - 1)))
        return repeated

    def within(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """bounds f32 [groups, n], ascending -> counts and totals, f64 [groups, n + 1], of the weights up to the first
        bound, between each two, and above the last."""
        index = torch.searchsorted(self.weight, bounds.contiguous(), right=True)
        return _differences(self._counted, index), _differences(self._summed, index)


def turned(ordered: Ordered, scales: Tensor, planes: int, turns: int) -> tuple[Tensor, Tensor]:
    """`scales` f32 [groups, layers] after turns of least squares and signs, and the error of each group, f64."""
    parts = Parts.of(ordered, scales, planes)
    error = parts.error(ordered)
    for _ in range(turns):
        fitted = least_squares(parts, planes, scales.shape[1] > planes)
        after = Parts.of(ordered, fitted, planes)
        reached = after.error(ordered)
        better = reached < error
        if not bool(better.any()):
            break
        scales, error = torch.where(better[:, None], fitted, scales), torch.where(better, reached, error)
        parts = after.where(better, parts)
    return scales, error


@dataclass(frozen=True)
class Parts:
    """Partition of the weights of groups by nearest sum. [groups, 2^planes], sums ascending.

    sums      f32
    order     i64, the number of each sum
    counted   f64, the total count of the weights nearest to each sum; summed: their total
    """

    sums: Tensor
    order: Tensor
    counted: Tensor
    summed: Tensor

    @staticmethod
    def of(ordered: Ordered, scales: Tensor, planes: int) -> Parts:
        """Of the sums of `scales` f32 [groups, layers]."""
        found = Sums(scales, planes)
        return Parts(found.sums, found.order, *ordered.within(found.bounds))

    def where(self, mask: Tensor, other: Parts) -> Parts:
        """These for groups in `mask`, `other` for the rest."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Parts(*(torch.where(mask[:, None], mine, theirs) for mine, theirs in pairs))

    def error(self, ordered: Ordered) -> Tensor:
        """Squares of what is left, f64 [groups]."""
        wide = self.sums.double()
        return ordered.squares + _sum(wide * (wide * self.counted - 2 * self.summed))


def greedy(ordered: Ordered, planes: int, zero_point: bool) -> Tensor:
    """Scales f32 [groups, layers] of the greedy start."""
    counts, size = ordered.counts, ordered.weight.shape[1]
    zero = _zero(ordered, zero_point)
    left = ordered.weight - zero
    scales = []
    for _ in range(planes):
        scale = (_sum(counts * left.abs()) / size).float()[:, None]
        left = left - torch.where(left >= 0, scale, -scale)
        scales.append(scale)
    return torch.cat(scales + [zero] * zero_point, 1)


def even(ordered: Ordered, planes: int, zero_point: bool, top: float) -> Tensor:
    """Scales f32 [groups, layers] by halves: all sums as far from each other, the largest `top` root mean squares."""
    zero = _zero(ordered, zero_point)
    spread = (_sum(ordered.counts * (ordered.weight - zero).double().square()) / ordered.weight.shape[1]).sqrt()
    shares = [top * 2.0**plane / (2**planes - 1) for plane in reversed(range(planes))]
    return torch.cat([(share * spread).float()[:, None] for share in shares] + [zero] * zero_point, 1)


def _zero(ordered: Ordered, zero_point: bool) -> Tensor:
    """The mean f32 [groups, 1] where a zero point begins with it, else 0."""
    mean = _sum(ordered.counts * ordered.weight) / ordered.weight.shape[1]
    return mean.float()[:, None] if zero_point else ordered.weight.new_zeros(len(ordered.weight), 1)


class Sums:
    """All 2^planes sums of scales f32 [groups, layers] of each group, rising.

    sums f32 [groups, 2^planes]; order i64, the number of each; bounds f32, halfway between them
    """

    def __init__(self, scales: Tensor, planes: int) -> None:
        self.sums, self.order = torch.sort(sums_of(scales, planes), dim=1, stable=True)
        self.bounds = (self.sums[:, 1:] + self.sums[:, :-1]) / 2

    def nearest(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """weight f32 [groups, n] -> numbers u8 and sums f32, of its shape, that are nearest, the lower of two."""
        index = torch.searchsorted(self.bounds, weight.contiguous())
        return self.order.gather(1, index).to(torch.uint8), self.sums.gather(1, index)


def sums_of(scales: Tensor, planes: int) -> Tensor:
    """f32 [groups, 2^planes]: what every number stands for, added up in the order of the format's definition."""
    total = scales.new_zeros(len(scales), 2**planes)
    for plane, signs in enumerate(_signs(planes, scales.device)):
        total = total.addcmul(scales[:, plane, None], signs)
    return total + scales[:, planes, None] if scales.shape[1] > planes else total


@functools.cache
def _signs(planes: int, device: torch.device) -> Tensor:
    """f32 [planes, 2^planes]: 1 where the bit of a plane is set in a number, else -1."""
    bits = torch.arange(2**planes, device=device) >> torch.arange(planes, device=device)[:, None]
    return (bits & 1).float() * 2 - 1


def least_squares(parts: Parts, planes: int, zero_point: bool) -> Tensor:
    """Scales f32 [groups, layers] with the least error for the signs that weights have in `parts`.

    Where planes are equal or opposite in a group, one of them gets all and the others nothing.
    """
    columns = _signs(planes, parts.order.device).double()[:, parts.order].transpose(0, 1)
    if zero_point:
        columns = torch.cat((columns, torch.ones_like(columns[:, :1])), 1)
    layers = columns.shape[1]
    j, k = torch.tril_indices(layers, layers, device=columns.device)
    products = _sum((columns * parts.counted[:, None])[:, j] * columns[:, k])
    system = columns.new_empty(len(columns), layers, layers + 1)
    system[:, j, k] = system[:, k, j] = products
    system[:, :, -1] = _sum(columns * parts.summed[:, None])
    return eliminated(system, UNDETERMINED * system[:, 0, 0]).float()


def eliminated(system: Tensor, least: Tensor) -> Tensor:
    """Solutions f64 [n, k] of the positive semi-definite systems [n, k, k + 1]; 0 for what is not determined.

    least   f64 [n]: a pivot that is no larger counts as 0
    """
    for j in range(system.shape[1]):
        pivot = system[:, j, j]
        sound = pivot > least
        inverse = torch.where(sound, 1 / torch.where(sound, pivot, 1.0), 0.0)
        row = system[:, j] * inverse[:, None]
        others = system - system[:, :, j, None] * row[:, None]
        others[:, j] = row
        system = others
    return system[:, :, -1]


def _sum(values: Tensor) -> Tensor:
    """Sums along the last of [..., size], halves added to halves: in one order on every device."""
    while (count := values.shape[-1]) > 1:
        half = count // 2
        added = values[..., :half] + values[..., half : 2 * half]
        if count % 2:
            added[..., 0] += values[..., -1]
        values = added
    return values[..., 0]


def _running(values: Tensor) -> Tensor:
    """[n, size + 1]: sums of the first 0, 1, ... of each row of f64 [n, size], in one order on every device."""
    total = torch.cat((values.new_zeros(len(values), 1), values), 1)
    reach = 1
    while reach < total.shape[1]:
        total = torch.cat((total[:, :reach], total[:, reach:] + total[:, :-reach]), 1)
        reach *= 2
    return total


def _differences(running: Tensor, index: Tensor) -> Tensor:
    """f64 [n, k + 1]: between running totals at 0, at each of `index` [n, k], and at the end."""
    found = torch.cat((running[:, :1], running.gather(1, index), running[:, -1:]), 1)
    return found[:, 1:] - found[:, :-1]
