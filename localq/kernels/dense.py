"""Products with 16-bit weights as checkpoints have them: checks of the tensors, then the kernel on torch's stream.

Works under CUDA graph capture and allocates nothing but its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, check, check_cuda, place
from localq.kernels.operand import Operand

COLUMNS = 8  # a row is a whole number of 16-byte loads


@dataclass(frozen=True)
class DenseOperand(Operand):
    """A matrix of plain weights T [out, in], row by row."""

    weight: Tensor

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes

    @property
    def key(self) -> tuple[object, ...]:
        """All go together."""
        return ()

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`dense_gemv`."""
        return dense_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, in 16 bits, in whole 16-byte loads."""
        fits = self.weight.dtype in HALF_TYPES and self.in_features % COLUMNS == 0
        return fits and self.weight.is_cuda

    def halves(self) -> tuple[DenseOperand, DenseOperand] | None:
        """Of an even number of rows."""
        rows = self.out_features // 2
        if self.out_features % 2:
            return None
        biases = (None, None) if self.bias is None else (self.bias[:rows], self.bias[rows:])
        return DenseOperand(self.weight[:rows], bias=biases[0]), DenseOperand(self.weight[rows:], bias=biases[1])


def dense_gemv(
    x: Tensor,
    operands: Sequence[DenseOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` in the dtype of x, in % 8 == 0, share x: one, or q, k and v, or gate and up; their
    results lie behind each other. With `activation` there are two of one size and y = activation(first) * second.
    `norm` needs one row. `out` may be float32 (logits); else the dtype of x. Sums in f32, rounded once, the same bits
    run after run. Raises ValueError by the argument's name.

    Memory-bound: `dense_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "dense_gemv"
    weights = [each.weight for each in operands]
    gemv.check_x(op, x, weights)
    for weight in weights:
        check_weight(op, weight, x)
    out, arguments = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "weights", weights[0])
    kernels.module().dense_gemv(matrices=[_arguments(each) for each in operands], **arguments, **place(x))
    return out


def _arguments(operand: DenseOperand) -> dict[str, int]:
    """The fields that csrc/rows/bind.cpp reads, by name."""
    out, columns = operand.weight.shape
    return {"weight": operand.weight.data_ptr(), "out_features": out, "in_features": columns}


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
