"""From weights to binary codes: a greedy start, then turns of least squares for scales and exact choice of signs.

The way of Xu et al., "Alternating multi-bit quantization" (ICLR 2018), which nuQmm and LUT-GEMM (Park et al., 2022)
quantize by. Every group of columns is solved by itself:

1. greedy: plane after plane, the signs of what is left, and the mean of its magnitudes; with a zero point, what is left
   begins as the weights less their mean;
2. least squares: the scales (and the zero point) that fit the signs best;
3. signs: of the 2^planes sums of scales, each weight gets the nearest;

2 and 3 in turns, as long as a group gets better, then once more 3 with the scales as they are stored, in f16. A turn
that does not lower the error of a group is not taken, so no error rises. Nothing depends on the device, on threads or
on the other groups: all sums have one order (`_sum`), everything else is one operation per element.

Groups lie in columns here, [size, groups], and scales [layers, groups]: so that sums add what lies behind each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

TURNS = 15  # as published
CHUNK_WEIGHTS = {"cpu": 2**17, "cuda": 2**22}
LARGEST = 65504.0  # of f16


def solve(weight: Tensor, planes: int, zero_point: bool) -> tuple[Tensor, Tensor]:
    """weight f32 [groups, size], each row a group -> numbers u8 [groups, size], scales f16 [groups, layers].

    Bit b of a number is set where plane b has a +. The zero point, where there is one, is the last layer. Weights are
    finite.
    """
    numbers = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = weight.new_empty(weight.shape[0], planes + zero_point, dtype=torch.float16)
    rows = max(1, CHUNK_WEIGHTS.get(weight.device.type, 2**17) // weight.shape[1])
    for first in range(0, weight.shape[0], rows):
        part = slice(first, first + rows)
        chosen, stored = _solve_chunk(weight[part].T.contiguous(), planes, zero_point)
        numbers[part], scales[part] = chosen.T, stored.T
    return numbers, scales


def _solve_chunk(weight: Tensor, planes: int, zero_point: bool) -> tuple[Tensor, Tensor]:
    scales = greedy(weight, planes, zero_point)
    numbers, error = nearest(weight, scales, planes)
    live = torch.arange(weight.shape[1], device=weight.device)
    some, signs = weight, numbers
    for _ in range(TURNS):
        fitted = least_squares(some, signs, planes, zero_point)
        chosen, reached = nearest(some, fitted, planes)
        better = reached < error[live]
        live = live[better]
        if not len(live):
            break
        some, signs = some[:, better], chosen[:, better]
        numbers[:, live], scales[:, live], error[live] = signs, fitted[:, better], reached[better]
    stored = scales.clamp(-LARGEST, LARGEST).half()
    return nearest(weight, stored.float(), planes)[0], stored


def greedy(weight: Tensor, planes: int, zero_point: bool) -> Tensor:
    """Scales f32 [layers, groups] of the greedy start for weight f32 [size, groups]."""
    size = weight.shape[0]
    zero = _sum(weight) / size if zero_point else weight.new_zeros(weight.shape[1])
    left = weight - zero
    scales = []
    for _ in range(planes):
        scale = _sum(left.abs()) / size
        left = left - torch.where(left >= 0, scale, -scale)
        scales.append(scale)
    return torch.stack(scales + [zero] * zero_point)


def nearest(weight: Tensor, scales: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """For weight [size, groups]: the numbers u8 [size, groups] of the nearest sums of `scales` [layers, groups], the
    lower of two that are as near; and the sums of squares of what is left, f32 [groups]."""
    sums, order = torch.sort(sums_of(scales, planes), dim=0, stable=True)
    bounds = (sums[1:] + sums[:-1]) / 2
    index = (weight > bounds[2 ** (planes - 1) - 1]).long() << (planes - 1)  # how many bounds lie below, by halves
    for bit in reversed(range(planes - 1)):
        index += (weight > bounds.gather(0, index + (2**bit - 1))).long() << bit
    return order.to(torch.uint8).gather(0, index), _sum((weight - sums.gather(0, index)).square())


def sums_of(scales: Tensor, planes: int) -> Tensor:
    """f32 [2^planes, groups]: what every number stands for, added up in the order of the format's definition."""
    bits = torch.arange(2**planes, device=scales.device)[:, None]
    total = scales.new_zeros(2**planes, scales.shape[1])
    for plane in range(planes):
        total = total + torch.where((bits >> plane & 1).bool(), scales[plane], -scales[plane])
    return total + scales[planes] if len(scales) > planes else total


def least_squares(weight: Tensor, numbers: Tensor, planes: int, zero_point: bool) -> Tensor:
    """Scales f32 [layers, groups] with the least error for signs that are given.

    Where planes are equal or opposite in a group, one of them gets all and the others nothing.
    """
    columns = [(numbers >> plane & 1).float() * 2 - 1 for plane in range(planes)]
    columns += [torch.ones_like(weight)] * zero_point
    layers = len(columns)
    system = weight.new_empty(weight.shape[1], layers, layers + 1, dtype=torch.float64)
    for j, column in enumerate(columns):
        system[:, j, j] = len(weight)
        for k in range(j + 1, layers):
            system[:, j, k] = system[:, k, j] = _sum(column * columns[k])
        system[:, j, -1] = _sum(column * weight)
    return _eliminated(system).float().T.contiguous()


def _eliminated(system: Tensor) -> Tensor:
    """Solutions f64 [n, k] of the positive semi-definite systems [n, k, k + 1]; 0 for what is not determined."""
    for j in range(system.shape[1]):
        pivot = system[:, j, j]
        sound = pivot > 1e-6  # entries are whole numbers before the first step
        inverse = torch.where(sound, 1 / torch.where(sound, pivot, 1.0), 0.0)
        row = system[:, j] * inverse[:, None]
        others = system - system[:, :, j, None] * row[:, None]
        others[:, j] = row
        system = others
    return system[:, :, -1]


def _sum(values: Tensor) -> Tensor:
    """Sums of the columns of f32 [size, n], halves added to halves: in one order on every device."""
    while (count := len(values)) > 1:
        half = count // 2
        added = values[:half] + values[half : 2 * half]
        if count % 2:
            added[0] += values[-1]
        values = added
    return values[0]
