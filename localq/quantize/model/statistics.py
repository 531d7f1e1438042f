"""Input statistics of matrices that read the same input: second moments, and the drift of the input.

The model runs twice: as the full model, and with the matrices quantized so far. x is the input of a matrix in the
quantized model, f in the full one; d is a residual that its output compensates as well (the drift of the residual
stream, for matrices that write into it). Over all tokens

H = sum x^T x / tokens              the metric: an error E of the matrix costs trace(E H E^T) of its output
W' = W + (W D + R) (H + damping)^-1      D = sum (f - x)^T x / tokens, R = sum d^T x / tokens

W' is the matrix whose output on x is closest, in least squares, to W f + d: the target that is quantized in place of W.
The same as in GPTAQ (Li et al. 2025, section 4), which has no d.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.formats.codebooks import rotation
from localq.quantize.model import linear_algebra
from localq.quantize.model.linear_algebra import pieces

F64_COLUMNS = 8192  # wider matrices are factored in f32: f64 factors would not fit beside them


class Statistics:
    """Sums over tokens for matrices [out, in] that read one input; f32 on `device`."""

    def __init__(self, columns: int, residual: int, device: torch.device) -> None:
        """Allocate the sums; residual: rows of a matrix that compensates for the drift of the stream, else 0."""
        self.tokens = 0
        self._moments = torch.zeros(columns, columns, device=device)
        self._drift = torch.zeros(columns, columns, device=device)
        self._owed = torch.zeros(residual, columns, device=device) if residual else None

    def add(self, x: Tensor, full: Tensor, owed: Tensor | None = None) -> None:
        """Add tokens; x, full f32 [T, in]: input in the quantized and in the full model; owed [T, out]: d."""
        self.tokens += len(x)
        self._moments.addmm_(x.T, x)
        self._drift.addmm_((full - x).T, x)
        if self._owed is not None and owed is not None:
            self._owed.addmm_(owed.T, x)

    def finish(self, weight: Tensor, damping: float) -> Tensor:
        """Replace `weight` f32 [out, in] by W' in place, and return H, f32 [in, in], symmetric.

        Call once, at the end: the sums are consumed, and H reuses the memory of one of them.
        """
        owed = weight @ self._drift if self._owed is None else self._owed.addmm_(weight, self._drift)
        metric = self._moments
        del self._drift, self._owed, self._moments
        linear_algebra.mean_transpose_(metric, 2 * self.tokens)
        owed /= self.tokens
        with damp_in_place(metric, damping):
            upper = _upper(metric)
        for rows in pieces(*owed.shape):
            part = owed[rows].to(upper.dtype)
            linear_algebra.solve_(upper, part)
            weight[rows] += part
        return metric


@dataclass(frozen=True)
class Factor:
    """H in the form that the code search takes: H = V V^T with V upper triangular.

    feedback  f32 [in, in]  the inverse of V
    white     f32 [in/step, step, step]  the blocks of V on its diagonal
    """

    feedback: Tensor
    white: Tensor


def factor(metric: Tensor, step: int) -> Factor:
    """`metric` f32 [in, in], positive definite (`damp`); in a multiple of `step`. In f64 up to 8192 columns."""
    upper = _upper(metric)
    blocks = [upper[at : at + step, at : at + step] for at in range(0, len(upper), step)]
    white = torch.stack(blocks).float()
    linear_algebra.invert_(upper)
    return Factor(upper.float(), white)


def damp(metric: Tensor, damping: float) -> Tensor:
    """Return metric + damping * its mean diagonal; the unit matrix for a zero metric."""
    heavy = metric.clone()
    _damp_(heavy.diagonal(), damping)
    return heavy


@contextmanager
def damp_in_place(metric: Tensor, damping: float) -> Iterator[None]:
    """While it is entered `metric` is what `damp` makes of it: there is no room for a second one."""
    diagonal = metric.diagonal()
    before = diagonal.clone()
    _damp_(diagonal, damping)
    try:
        yield
    finally:
        diagonal.copy_(before)


def _damp_(diagonal: Tensor, damping: float) -> None:
    mean = diagonal.mean()
    if bool(mean == 0):  # the diagonal holds squares: then the whole matrix is 0
        diagonal.fill_(1)
    else:
        diagonal.add_(damping * mean)


def _upper(metric: Tensor) -> Tensor:
    """Return V; each failed try adds ten times more to the diagonal."""
    upper = metric.to(torch.float64 if len(metric) <= F64_COLUMNS else torch.float32, copy=True)
    diagonal, more = upper.diagonal().mean(), 0.0
    for _ in range(6 if bool(torch.isfinite(diagonal)) else 0):
        upper.diagonal().add_(more * diagonal)
        if linear_algebra.factor_(upper):
            return upper
        upper.copy_(metric)
        more = max(1e-4, 10 * more)
    why = "the model produces non-finite values on the calibration text"
    raise bad_file("weights", why, "Check the weights with `localq verify`.")


def rotate_metric_(metric: Tensor, signs: Tensor) -> None:
    """Rotate both sides of the metric in place."""
    for rows in pieces(*metric.shape):
        metric[rows] = rotation.rotate(metric[rows], signs)
    for columns in pieces(*metric.shape):
        metric[:, columns] = rotation.rotate(metric[:, columns].T.contiguous(), signs).T
