"""What all matrix-vector products share, whatever the format of the weights: `csrc/gemv.h` in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from localq.kernels.checks import check

ROWS = 8  # rows of x that a matrix-vector product takes
SEGMENTS = 3  # matrices that one launch takes: q, k and v, or gate and up
ACTIVATIONS = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2, "gelu": 3}


class Norm(NamedTuple):
    """RMSNorm of x in the prologue.

    weight  [in]: the dtype of x, applied after x/rms was rounded (llama), or f32, applied before the one rounding
            (gemma, whose weight is 1 + the stored one)
    eps     added to the mean square
    """

    weight: Tensor
    eps: float


def extras(
    op: str,
    x: Tensor,
    outs: Sequence[int],
    biases: Sequence[Tensor | None] | None,
    norm: Norm | None,
    residual: Tensor | None,
    activation: str | None,
    out: Tensor,
) -> dict[str, object]:
    """Arguments of the compiled operations for what surrounds the product; raises ValueError by name.

    x [rows, in]; `outs` rows of each matrix. With an activation there are two matrices of one size, no residual, and
    out is [rows, outs[0]], else [rows, sum(outs)], in the dtype of x or float32.
    """
    rows, columns = x.shape
    if not 1 <= len(outs) <= SEGMENTS:
        raise ValueError(f"{op}: {len(outs)} matrices, must be 1 to {SEGMENTS}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation = {activation!r}, must be one of {list(ACTIVATIONS)}")
    if activation is not None and (len(outs) != 2 or outs[0] != outs[1] or residual is not None):
        raise ValueError(f"{op}: an activation needs two matrices of one size and no residual")
    if norm is not None:
        if rows != 1:
            raise ValueError(f"{op}: x has {rows} rows, a norm in the prologue needs 1")
        check(op, "norm weight", norm.weight, x.device, (x.dtype, torch.float32), columns)
    if residual is not None:
        check(op, "residual", residual, x.device, (x.dtype,), rows * sum(outs))
    given = list(biases) if biases is not None else [None] * len(outs)
    for bias, count in zip(given, outs, strict=True):
        if bias is not None:
            check(op, "bias", bias, x.device, (x.dtype,), count)
    check(op, "out", out, x.device, (x.dtype, torch.float32), rows * result_width(outs, activation))
    return {
        "norm": 0 if norm is None else 1 + (norm.weight.dtype == torch.float32),
        "norm_weight": 0 if norm is None else norm.weight.data_ptr(),
        "eps": 0.0 if norm is None else norm.eps,
        "residual": 0 if residual is None else residual.data_ptr(),
        "activation": ACTIVATIONS[activation],
        "biases": [0 if bias is None else bias.data_ptr() for bias in given],
        "y_is_f32": out.dtype == torch.float32,
    }


def result_width(outs: Sequence[int], activation: str | None) -> int:
    """Columns of the result."""
    return outs[0] if activation is not None else sum(outs)
