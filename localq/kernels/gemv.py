"""Common part of all matrix-vector products, whatever the format of the weights: `csrc/common/gemv.h` in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from localq.kernels.checks import HALF_TYPES, TYPES, check
from localq.kernels.operand import Operand

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


def check_x(op: str, x: Tensor, weights: Sequence[Tensor]) -> None:
    """x is [1 to `ROWS`, in] in 16 bit, where `weights` are, one tensor of each matrix; raises ValueError by name."""
    if x.dim() != 2 or not 1 <= x.shape[0] <= ROWS:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, must be [1 to {ROWS}, in]")
    if not 1 <= len(weights) <= SEGMENTS:
        raise ValueError(f"{op}: {len(weights)} matrices, must be 1 to {SEGMENTS}")
    check(op, "x", x, weights[0].device, HALF_TYPES, x.numel())


def check_columns(op: str, x: Tensor, columns: int) -> None:
    """x has as many columns as a matrix; raises ValueError."""
    if columns != x.shape[1]:
        raise ValueError(f"{op}: x has {x.shape[1]} columns, a matrix has {columns}")


def prepare(
    op: str,
    x: Tensor,
    operands: Sequence[Operand],
    norm: Norm | None,
    residual: Tensor | None,
    activation: str | None,
    out: Tensor | None,
) -> tuple[Tensor, dict[str, object]]:
    """The result, allocated where `out` is None, and the arguments of a compiled product but its matrices and place.

    x [rows, in]; outs: the rows of each operand. With an activation there are two operands of one size, no residual,
    and out is [rows, outs[0]], else [rows, sum(outs)], in the dtype of x or float32. Raises ValueError by name.
    """
    rows, columns = x.shape
    outs = [each.out_features for each in operands]
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
    for each in operands:
        if each.bias is not None:
            check(op, "bias", each.bias, x.device, (x.dtype,), each.out_features)
    width = outs[0] if activation is not None else sum(outs)
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    check(op, "out", out, x.device, (x.dtype, torch.float32), rows * width)
    return out, {
        "x": x.data_ptr(),
        "y": out.data_ptr(),
        "type": TYPES[x.dtype],
        "rows": rows,
        "norm": 0 if norm is None else 1 + (norm.weight.dtype == torch.float32),
        "norm_weight": 0 if norm is None else norm.weight.data_ptr(),
        "eps": 0.0 if norm is None else norm.eps,
        "residual": 0 if residual is None else residual.data_ptr(),
        "activation": ACTIVATIONS[activation],
        "biases": [0 if each.bias is None else each.bias.data_ptr() for each in operands],
        "y_is_f32": out.dtype == torch.float32,
    }


def norm_arguments(op: str, norm: Norm | None, x: Tensor) -> dict[str, object]:
    """The norm of x as the bindings take it."""
    if norm is None:
        return {"norm": 0, "norm_weight": 0, "eps": 0.0}
    check(op, "norm weight", norm.weight, x.device, (x.dtype, torch.float32), x.numel())
    kind = 1 + (norm.weight.dtype == torch.float32)
    return {"norm": kind, "norm_weight": norm.weight.data_ptr(), "eps": norm.eps}
