"""Cholesky factor of a large symmetric matrix, in the matrix's own memory, a panel of columns at a time.

H = V V^T with V upper triangular, so that columns are finished from the last to the first; then products with the
inverse of H, or the inverse of V. Memory beside the matrix: two panels at most. A matrix of one panel is factored by
one call of LAPACK or cuSOLVER.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = 2**26  # of a piece


def pieces(rows: int, columns: int, factor: int = 1) -> list[slice]:
    """Split [rows, columns] into equal row slices of at most `factor` * `VALUES` values, and at least a row."""
    count = min(-(-rows * columns // (factor * VALUES)), rows)
    size = -(-rows // max(count, 1))
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


PANEL = 2048  # columns


def factor_(matrix: Tensor) -> bool:
    """Replace matrix [n, n], f32 or f64, of which only the upper triangle is read, by V, with zeros below.

    Returns False where the matrix is not positive definite; its content is then undefined.
    """
    for begin, end in reversed(_panels(len(matrix))):
        block = matrix[begin:end, begin:end]
        lower, info = torch.linalg.cholesky_ex(block.flip(0, 1))
        if int(info):
            return False
        upper = lower.flip(0, 1)
        block.copy_(upper)
        matrix[end:, begin:end] = 0
        above = matrix[:begin, begin:end]
        above.copy_(torch.linalg.solve_triangular(upper.T, above, upper=False, left=False))
        for first, last in _panels(begin):
            matrix[:last, first:last].addmm_(above[:last], above[first:last].T, alpha=-1)
    return True


def solve_(upper: Tensor, rows: Tensor) -> None:
    """Replace rows [m, n] by X with X H = rows; upper [n, n]: V of `factor_`, in the same dtype."""
    panels = _panels(len(upper))
    for begin, end in reversed(panels):  # Y V^T = rows
        part = rows[:, begin:end]
        part.addmm_(rows[:, end:], upper[begin:end, end:].T, alpha=-1)
        block = upper[begin:end, begin:end]
        part.copy_(torch.linalg.solve_triangular(block.T, part, upper=False, left=False))
    for begin, end in panels:  # X V = Y
        part = rows[:, begin:end]
        part.addmm_(rows[:, :begin], upper[:begin, begin:end], alpha=-1)
        block = upper[begin:end, begin:end]
        part.copy_(torch.linalg.solve_triangular(block, part, upper=True, left=False))


def invert_(upper: Tensor) -> None:
    """Replace V [n, n] of `factor_` by its inverse."""
    for begin, end in _panels(len(upper)):
        block = upper[begin:end, begin:end]
        ones = torch.eye(end - begin, dtype=upper.dtype, device=upper.device)
        block.copy_(torch.linalg.solve_triangular(block, ones, upper=True))
        above = upper[:begin, begin:end]
        above.copy_((upper[:begin, :begin] @ above) @ block).neg_()


def mean_transpose_(matrix: Tensor, parts: float) -> None:
    """Replace matrix [n, n] by (matrix + its transpose) / parts."""
    for begin, end in _panels(len(matrix)):
        for first, last in _panels(end):
            both = matrix[begin:end, first:last] + matrix[first:last, begin:end].T
            both /= parts
            matrix[begin:end, first:last] = both
            matrix[first:last, begin:end] = both.T


def _panels(columns: int) -> list[tuple[int, int]]:
    """Return begin and end of each panel."""
    return [(begin, min(begin + PANEL, columns)) for begin in range(0, columns, PANEL)]
