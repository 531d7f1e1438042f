"""Products with 8-bit weights (localq/quant/int8.py): checks of the tensors, then the kernel on torch's stream.

Works under CUDA graph capture and allocates nothing but its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import PackedRows, check, check_cuda, place

COLUMNS = 16  # a row is a whole number of 16-byte loads


@dataclass(frozen=True)
class Int8Matrix(PackedRows):
    """The tensors of one matrix [out, in], in % 16 == 0.

    codes   i8  [out, in]
    scales  f32 [out]      weight = code * scale of its row
    """

    codes: Tensor
    scales: Tensor

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.codes.shape[1]


def int8_gemv(
    x: Tensor,
    matrices: Sequence[Int8Matrix],
    *,
    biases: Sequence[Tensor | None] | None = None,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + bias for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `matrices` share x: one, or q, k and v, or gate and up; their results lie behind each other. With `activation` there
    are two of one size and y = activation(first) * second. `norm` needs one row. `out` may be float32 (logits); else
    the dtype of x. Sums of code * x in f32, then the scale, rounded once; the same bits run after run. Raises
    ValueError by the argument's name.

    Memory-bound: `int8_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "int8_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in matrices])
    for matrix in matrices:
        check_matrix(op, matrix, x)
    outs = [matrix.out_features for matrix in matrices]
    out, arguments = gemv.prepared(op, x, outs, biases, norm, residual, activation, out)
    check_cuda(op, "codes", matrices[0].codes)
    of_kernel = [(each.codes.data_ptr(), each.scales.data_ptr(), *each.codes.shape) for each in matrices]
    kernels.module().int8_gemv(matrices=of_kernel, **arguments, **place(x))
    return out


def int8_gemv_bytes(rows: int, out: int, columns: int, itemsize: int = 2) -> int:
    """Bytes that `int8_gemv` must move: codes and scales once, x once, y once."""
    return out * columns + 4 * out + itemsize * rows * (out + columns)


def check_matrix(op: str, matrix: Int8Matrix, x: Tensor) -> None:
    """Raises ValueError, naming the tensor, unless `matrix` is one that the kernel reads beside x [rows, in]."""
    codes = matrix.codes
    if codes.dim() != 2 or codes.shape[1] != x.shape[1]:
        raise ValueError(f"{op}: codes have shape {tuple(codes.shape)}, must be [out, {x.shape[1]}] as x is")
    if codes.shape[1] % COLUMNS or codes.numel() == 0:
        shape = tuple(codes.shape)
        raise ValueError(f"{op}: the matrix is {shape}, its columns must be a positive multiple of {COLUMNS}")
    check(op, "codes", codes, x.device, (torch.int8,), codes.numel())
    check(op, "scales", matrix.scales, x.device, (torch.float32,), codes.shape[0])
