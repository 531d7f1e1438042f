"""What calibration tells about matrices that read the same input: second moments, and how far the input has drifted.

The model is run twice beside itself: as it was, and with the matrices that are quantized already. x is the input of a
matrix in the quantized model, f in the full one; d what its output is to make up for besides (the drift of the
residual stream, for matrices that write into it). Over all tokens

H = sum x^T x / tokens              the metric: an error E of the matrix costs trace(E H E^T) of its output
W' = W + (W D + R) (H + damping)^-1      D = sum (f - x)^T x / tokens, R = sum d^T x / tokens

is the matrix whose output on x comes nearest, in least squares, to W f + d: the goal that is quantized in place of W.
As in GPTAQ (Li et al. 2025, section 4), which has no d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq.errors import bad_file

F64_COLUMNS = 8192  # wider matrices are factored in f32: their f64 factors would not fit beside them


class Statistics:
    """Sums over tokens for matrices [out, in] that read one input; on `device`, in f32."""

    def __init__(self, columns: int, residual: int, device: torch.device) -> None:
        """residual: rows of the matrix where its output is to make up for the drift of the stream, else 0."""
        self.tokens = 0
        self._moments = torch.zeros(columns, columns, device=device)
        self._drift = torch.zeros(columns, columns, device=device)
        self._owed = torch.zeros(residual, columns, device=device) if residual else None

    def add(self, x: Tensor, full: Tensor, owed: Tensor | None = None) -> None:
        """x, full f32 [T, in]: the input in the quantized and in the full model; owed [T, out]: d."""
        self.tokens += len(x)
        self._moments.addmm_(x.T, x)
        self._drift.addmm_((full - x).T, x)
        if self._owed is not None and owed is not None:
            self._owed.addmm_(owed.T, x)

    def metric(self) -> Tensor:
        """H, f32 [in, in], symmetric."""
        return (self._moments + self._moments.T).div_(2 * self.tokens)

    def goal(self, weights: list[Tensor], metric: Tensor, damping: float) -> list[Tensor]:
        """W' of each of `weights` f32 [out, in]; `metric` is `metric()`."""
        lower = _cholesky(damped(metric, damping))
        goals = []
        for weight in weights:
            owed = weight @ self._drift
            if self._owed is not None:
                owed += self._owed
            owed /= self.tokens
            goals.append(weight + torch.cholesky_solve(owed.T.to(lower.dtype), lower).T.float())
        return goals


@dataclass(frozen=True)
class Factor:
    """H in the form that the search reads: H = V V^T with V upper triangular.

    feedback  f32 [in, in]  the inverse of V
    white     f32 [in/step, step, step]  the blocks of V on its diagonal
    """

    feedback: Tensor
    white: Tensor


def factor(metric: Tensor, step: int) -> Factor:
    """`metric` f32 [in, in], positive definite (`damped`); in a multiple of `step`.

    V from the Cholesky factor of H with both its sides turned round. In f64 up to 8192 columns.
    """
    upper = _cholesky(metric.flip(0, 1)).flip(0, 1)
    columns = len(metric)
    white = torch.stack([upper[at : at + step, at : at + step] for at in range(0, columns, step)]).float()
    ones = torch.eye(columns, dtype=upper.dtype, device=upper.device)
    return Factor(torch.linalg.solve_triangular(upper, ones, upper=True).float(), white)


def damped(metric: Tensor, damping: float) -> Tensor:
    """metric + damping times its mean diagonal; where that is nothing, the unit matrix."""
    mean = metric.diagonal().mean()
    if bool(mean == 0):
        return torch.eye(len(metric), device=metric.device)
    heavy = metric.clone()
    heavy.diagonal().add_(damping * mean)
    return heavy


def _cholesky(matrix: Tensor) -> Tensor:
    """Lower triangle; more is added to the diagonal, ten times as much each try, where rounding asks for it."""
    matrix = matrix.double() if len(matrix) <= F64_COLUMNS else matrix
    diagonal, more = matrix.diagonal().mean(), 0.0
    for _ in range(6):
        tried = matrix
        if more > 0:
            tried = matrix.clone()
            tried.diagonal().add_(more * diagonal)
        lower: Tensor
        lower, info = torch.linalg.cholesky_ex(tried)
        if int(info) == 0 and bool(torch.isfinite(diagonal)):
            return lower
        more = max(1e-4, 10 * more)
    why = "on the calibration text the model computes values that are not finite"
    raise bad_file("weights", why, "Fetch the model again.")
