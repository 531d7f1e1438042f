"""Products with 8-bit weights (`formats.int8`): checks of the tensors, then the kernel on torch's stream.

Works under CUDA graph capture and allocates nothing but its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, PackedRows, addresses, check, check_cuda, place
from localq.kernels.operand import Operand

COLUMNS = 16  # a row is a whole number of 16-byte loads


@dataclass(frozen=True)
class Int8Operand(PackedRows, Operand):
    """A matrix [out, in] in 8 bits, in % 16 == 0.

    codes   i8  [out, in]
    scales  f32 [out]      weight = code * scale of its row
    """

    codes: Tensor
    scales: Tensor

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def key(self) -> tuple[object, ...]:
        """All go together."""
        return ()

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`int8_gemv`."""
        return int8_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, in 16 bit."""
        return self.codes.is_cuda and dtype in HALF_TYPES


def int8_gemv(
    x: Tensor,
    operands: Sequence[Int8Operand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x: one, or q, k and v, or gate and up; their results lie behind each other. With `activation` there
    are two of one size and y = activation(first) * second. `norm` needs one row. `out` may be float32 (logits); else
    the dtype of x. Sums of code * x in f32, then the scale, rounded once; the same bits run after run. Raises
    ValueError by the argument's name.

    Memory-bound: `int8_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "int8_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    for matrix in operands:
        check_matrix(op, matrix, x)
    out, arguments = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "codes", operands[0].codes)
    of_kernel = [
        {
            **addresses(codes=each.codes, scales=each.scales),
            "out_features": each.out_features,
            "in_features": each.in_features,
        }
        for each in operands
    ]
    kernels.module().int8_gemv(matrices=of_kernel, **arguments, **place(x))
    return out


def int8_gemv_bytes(rows: int, out: int, columns: int, itemsize: int = 2) -> int:
    """Bytes that `int8_gemv` must move: codes and scales once, x once, y once."""
    return out * columns + 4 * out + itemsize * rows * (out + columns)


def check_matrix(op: str, matrix: Int8Operand, x: Tensor) -> None:
    """Raises ValueError, naming the tensor, unless `matrix` is one that the kernel reads beside x [rows, in]."""
    codes = matrix.codes
    if codes.dim() != 2 or codes.shape[1] != x.shape[1]:
        raise ValueError(f"{op}: codes have shape {tuple(codes.shape)}, must be [out, {x.shape[1]}] as x is")
    if codes.shape[1] % COLUMNS or codes.numel() == 0:
        shape = tuple(codes.shape)
        raise ValueError(f"{op}: the matrix is {shape}, its columns must be a positive multiple of {COLUMNS}")
    check(op, "codes", codes, x.device, (torch.int8,), codes.numel())
    check(op, "scales", matrix.scales, x.device, (torch.float32,), codes.shape[0])
