"""The 16 values of each row that lose least: weighted k-means in one dimension, many rows at once.

On sorted rows a cluster is a run of columns, and its weight, sum and loss are differences of running sums. So the best
runs can be found exactly by dynamic programming, at a cost of the square of the columns. Here the columns of a row are
first put into 64 cells, narrow where many good values lie: by the density to the power 1/3 (Panter and Dite 1951).
Among runs of whole cells the best are found exactly, and Lloyd's rounds move their bounds to where they are best among
the columns, each at the cost of a search for 15 bounds. Beside the exact solution over all columns that loses 0.3 to
0.5 % more (tests/formats/squeezellm/test_squeezellm.py); Lloyd's rounds from quantiles alone lose 3 to 11 % more.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = 16
ROUNDS = 40  # of Lloyd
CELLS = 64
LEAST = 1e-4  # of the mean importance: what a column counts at least, so that none is left out altogether


def fitted(weight: Tensor, importance: Tensor | None = None, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """weight f32 [rows, in], importance f32 [in] or None -> table f16 [rows, 16], ascending, codes u8 [rows, in].

    Both minimise sum over k of importance[k] * (weight - table[code])^2 for each row, as far as Lloyd's rounds come.
    """
    ordered, places = weight.sort(dim=1)
    counts = _counts(importance, weight)[places]
    sums = _running(counts), _running(counts * ordered)
    values = _means(sums, _first_bounds(ordered, counts), ordered)
    for _ in range(rounds):
        bounds = torch.searchsorted(ordered, ((values[:, 1:] + values[:, :-1]) / 2).float())
        values = _means(sums, bounds, ordered)
    table = values.to(torch.float16)
    middles = (table[:, 1:].float() + table[:, :-1].float()) / 2
    return table, torch.searchsorted(middles, weight.contiguous()).to(torch.uint8)


def _counts(importance: Tensor | None, weight: Tensor) -> Tensor:
    """Return the importance of each column, f64 [in], clamped to a positive minimum."""
    if importance is None or not bool((importance > 0).any()):
        return torch.ones(weight.shape[1], dtype=torch.float64, device=weight.device)
    wide = importance.to(weight.device, torch.float64)
    return wide.clamp(min=LEAST * float(wide.mean()))


def _running(of: Tensor) -> Tensor:
    """[rows, in] -> f64 [rows, in + 1]: sums of the first k."""
    return torch.nn.functional.pad(of.double().cumsum(1), (1, 0))


def _first_bounds(ordered: Tensor, counts: Tensor) -> Tensor:
    """Return 15 bounds among the sorted columns, int64 [rows, 15]: the best of those between the cells."""
    gaps = ordered.double().diff(dim=1).clamp_(min=0)
    between = (counts[:, 1:] + counts[:, :-1]) / 2
    mass = (between * gaps.square()).pow_(1 / 3).cumsum(1)  # (count / gap)^(1/3) * gap
    shares = torch.arange(1, CELLS, dtype=torch.float64, device=ordered.device) / CELLS
    inner = torch.searchsorted(mass, mass[:, -1:] * shares) + 1
    edges = torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=ordered.shape[1])
    weights, totals, squares = (
        _running(each).gather(1, edges) for each in (counts, counts * ordered, counts * ordered.double().square())
    )
    return edges.gather(1, _best_cuts(_losses(weights, totals, squares)))


def _losses(weights: Tensor, totals: Tensor, squares: Tensor) -> Tensor:
    """Running sums [rows, cells + 1] -> loss f32 [rows, last, first] of one value for the cells first .. last - 1."""
    weight, total, square = (each.unsqueeze(2) - each.unsqueeze(1) for each in (weights, totals, squares))
    loss = (square - total.square() / weight.clamp(min=1e-300)).clamp_(min=0).float()
    backwards = torch.ones(loss.shape[1:], dtype=torch.bool, device=loss.device).triu()
    return loss.masked_fill_(backwards, torch.inf)


def _best_cuts(loss: Tensor) -> Tensor:
    """[rows, last, first] -> where to cut cells into 16 runs of the least loss in all, int64 [rows, 15]."""
    least, chosen = loss[:, :, 0], []
    for _ in range(VALUES - 1):
        found = (loss + least.unsqueeze(1)).min(2)
        least, before = found.values, found.indices
        chosen.append(before)
    at, cuts = torch.full_like(chosen[0][:, :1], loss.shape[1] - 1), []
    for before in reversed(chosen):
        at = before.gather(1, at)
        cuts.append(at)
    return torch.cat(cuts[::-1], 1)


def _means(sums: tuple[Tensor, Tensor], bounds: Tensor, ordered: Tensor) -> Tensor:
    """Weighted means of the runs between `bounds`, f64 [rows, 16], ascending; of an empty run the column behind it."""
    columns = ordered.shape[1]
    edges = torch.nn.functional.pad(torch.nn.functional.pad(bounds, (1, 0)), (0, 1), value=columns)
    count, total = (each.gather(1, edges).diff(dim=1) for each in sums)
    nearest = ordered.gather(1, edges[:, :-1].clamp(max=columns - 1)).double()
    return torch.where(count > 0, total / count, nearest)
