"""Operations on MXFP4 weights (`formats.mxfp4`): checks of the tensors, then the kernels on torch's stream.

All work under CUDA graph capture and allocate nothing but their result. Stacks of experts: `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, TYPES, NibbleRows, addresses, check, check_cuda, check_slab, place
from localq.kernels.operand import Operand

BLOCK = 32
COLUMNS = 64  # a row that `mxfp4_gemv` reads is a whole number of them
WIDEST = 49_152  # columns: one row of x in shared memory, which is 99 KiB on the smallest card


@dataclass(frozen=True)
class Mxfp4Operand(NibbleRows, Operand):
    """A matrix [out, in] in MXFP4, in % 32 == 0 (of products in % 64 == 0); codes 16-byte aligned.

    codes   u8 [out, in/2]    the even column is the low nibble
    scales  u8 [out, in/32]   E8M0
    """

    codes: Tensor
    scales: Tensor

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
        """`mxfp4_gemv`."""
        return mxfp4_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, in 16 bit."""
        return self.codes.is_cuda and dtype in HALF_TYPES


def reads(matrix: Mxfp4Operand) -> bool:
    """Return whether `mxfp4_gemv` has a kernel for its columns, on every card."""
    return matrix.in_features % COLUMNS == 0 and matrix.in_features <= WIDEST


def mxfp4_gemv(
    x: Tensor,
    operands: Sequence[Mxfp4Operand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x: one, or q, k and v, or gate and up; their results lie behind each other. With `activation` there
    are two of one size and y = activation(first) * second. `norm` needs one row. `out` may be float32 (logits); else
    the dtype of x. Sums in f32, rounded once, the same bits run after run. Raises ValueError by the argument's name,
    also where one row of x does not fit into shared memory (`reads`).

    Memory-bound: `mxfp4_gemv_bytes` over the memory bandwidth is the floor of up to 4 rows that shared memory holds;
    more are multiplied some at a time, which reads the weights as often.
    """
    op = "mxfp4_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    for matrix in operands:
        check_matrix(op, matrix, COLUMNS)
        gemv.check_columns(op, x, matrix.in_features)
        check(op, "codes", matrix.codes, x.device, (torch.uint8,), matrix.codes.numel())
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
    kernels.module().mxfp4_gemv(matrices=of_kernel, **arguments, **place(x))
    return out


def mxfp4_dequantize(
    matrix: Mxfp4Operand, dtype: torch.dtype, out: Tensor | None = None, rows: tuple[int, int] | None = None
) -> Tensor:
    """The weights in `dtype` (float16, bfloat16 or float32) -> [out, in], bit for bit `mxfp4.dequantize`.

    `rows` = (first, count): only a slab of them.

    Memory-bound: `mxfp4_dequantize_bytes` over the memory bandwidth is the floor.
    """
    op = "mxfp4_dequantize"
    check_matrix(op, matrix, BLOCK)
    first, count = check_slab(op, dtype, rows, matrix.out_features)
    if out is None:
        out = torch.empty(count, matrix.in_features, dtype=dtype, device=matrix.codes.device)
    check(op, "out", out, matrix.codes.device, (dtype,), count * matrix.in_features)
    check_cuda(op, "codes", matrix.codes)
    kernels.module().mxfp4_dequantize(
        codes=matrix.codes.data_ptr() + first * (matrix.in_features // 2),
        scales=matrix.scales.data_ptr() + first * (matrix.in_features // BLOCK),
        out=out.data_ptr(),
        type=TYPES[dtype],
        count=count * matrix.in_features,
        **place(matrix.codes),
    )
    return out


def mxfp4_weight_bytes(count: int) -> int:
    """Bytes of `count` weights: codes and scales."""
    return count // 2 + count // BLOCK


def mxfp4_gemv_bytes(rows: int, out: int, columns: int, itemsize: int = 2) -> int:
    """Bytes that `mxfp4_gemv` must move: weights once, x once, y once."""
    return mxfp4_weight_bytes(out * columns) + itemsize * rows * (out + columns)


def mxfp4_dequantize_bytes(out: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes that `mxfp4_dequantize` must move."""
    return mxfp4_weight_bytes(out * columns) + out * columns * dtype.itemsize


def check_matrix(op: str, matrix: Mxfp4Operand, step: int) -> None:
    """Raises ValueError, naming the tensor, unless both fit together and the columns are a multiple of `step`."""
    codes, scales = matrix.codes, matrix.scales
    if codes.dim() != 2 or not codes.numel() or 2 * codes.shape[1] % step:
        shape = tuple(codes.shape)
        raise ValueError(f"{op}: codes have shape {shape}, must be [out, in/2], in a positive multiple of {step}")
    check(op, "codes", codes, codes.device, (torch.uint8,), codes.numel())
    check(op, "scales", scales, codes.device, (torch.uint8,), codes.numel() // (BLOCK // 2))
