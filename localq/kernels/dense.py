"""Products with 16-bit weights as checkpoints have them: checks of the tensors, then the kernel on torch's stream.

Works under CUDA graph capture and allocates nothing but its result.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import check, check_cuda, place

COLUMNS = 8  # a row is a whole number of 16-byte loads


def dense_gemv(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    biases: Sequence[Tensor | None] | None = None,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + bias for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `weights` [out, in] in the dtype of x, row by row, in % 8 == 0, share x: one, or q, k and v, or gate and up; their
    results lie behind each other. With `activation` there are two of one size and y = activation(first) * second.
    `norm` needs one row. `out` may be float32 (logits); else the dtype of x. Sums in f32, rounded once, the same bits
    run after run. Raises ValueError by the argument's name.

    Memory-bound: `dense_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "dense_gemv"
    gemv.check_x(op, x, weights)
    for weight in weights:
        check_weight(op, weight, x)
    outs = [weight.shape[0] for weight in weights]
    out, arguments = gemv.prepared(op, x, outs, biases, norm, residual, activation, out)
    check_cuda(op, "weights", weights[0])
    kernels.module().dense_gemv(
        matrices=[(weight.data_ptr(), *weight.shape) for weight in weights], **arguments, **place(x)
    )
    return out


def dense_gemv_bytes(rows: int, out: int, columns: int, itemsize: int = 2) -> int:
    """Bytes that `dense_gemv` must move: weights once, x once, y once."""
    return 2 * out * columns + itemsize * rows * (out + columns)


def check_weight(op: str, weight: Tensor, x: Tensor) -> None:
    """Raises ValueError unless `weight` is a matrix that the kernel reads beside x [rows, in]."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"{op}: a matrix has shape {tuple(weight.shape)}, must be [out, {x.shape[1]}] as x is")
    if weight.shape[1] % COLUMNS or weight.numel() == 0:
        shape = tuple(weight.shape)
        raise ValueError(f"{op}: the matrix is {shape}, its columns must be a positive multiple of {COLUMNS}")
    check(op, "weights", weight, x.device, (x.dtype,), weight.numel())
