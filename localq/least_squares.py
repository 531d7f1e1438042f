"""Coefficients that are not below 0 and bring points nearest to values, each by its own measure. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def least_squares(points: Sequence[tuple[float, ...]], values: Sequence[float]) -> tuple[float, float, float]:
    """Coefficients, none below 0, that bring `points` nearest to `values` in parts of each value.

    All choices of coefficients that are not 0 are tried: there are three.
    """
    scaled = [[each / value for each in point] for point, value in zip(points, values, strict=True)]
    best, least = (0.0, 0.0, 0.0), float(len(values))
    for size in (1, 2, 3):
        for chosen in combinations((2, 1, 0), size):  # among equals, bytes explain before the rest does
            found = _solved([[row[index] for index in chosen] for row in scaled])
            if found is None or min(found) < 0:
                continue
            full = [0.0, 0.0, 0.0]
            for index, value in zip(chosen, found, strict=True):
                full[index] = value
            error = sum((sum(a * b for a, b in zip(row, full, strict=True)) - 1) ** 2 for row in scaled)
            if error < least - 1e-9:
                best, least = (full[0], full[1], full[2]), error
    return best


def _solved(rows: list[list[float]]) -> list[float] | None:
    """x with `rows` x nearest to ones, by the normal equations; None where they have no single solution."""
    size = len(rows[0])
    table = [[sum(r[i] * r[j] for r in rows) for j in range(size)] + [sum(r[i] for r in rows)] for i in range(size)]
    for i in range(size):
        pivot = table[i][i]
        if pivot <= 1e-12 * max(abs(each) for each in table[i]):
            return None
        table[i] = [each / pivot for each in table[i]]
        for j in range(size):
            if j != i:
                table[j] = [a - table[j][i] * b for a, b in zip(table[j], table[i], strict=True)]
    return [line[-1] for line in table]
