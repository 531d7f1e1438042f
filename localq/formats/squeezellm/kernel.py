"""Weights of 4 bits with 16 values a row (`formats.squeezellm`): checks of the tensors, then the kernels.

Work under CUDA graph capture and allocate nothing but their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, TYPES, NibbleRows, addresses, check, check_cuda, place, slab_arguments
from localq.kernels.operand import Operand

COLUMNS = 32  # of a load of 16 bytes: a product takes whole ones
WORD = 8  # codes that are unpacked together
VALUES = 16
GROUP, STEP = 8, 64  # rows of a tile, and bytes of each that lie behind each other in it


@dataclass(frozen=True)
class RowLutOperand(NibbleRows, Operand):
    """A matrix [out, in] of SqueezeLLM.

    codes   u8  [out, in / 2]   byte j of a row: column 2j in the low nibble, 2j + 1 in the high one
    table   f16 [out, 16]       what the codes of a row stand for
    tiled   the bytes of `codes` are in the order of `formats.squeezellm.tiles`, which is faster
    """

    codes: Tensor
    table: Tensor
    tiled: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.codes.nbytes + self.table.nbytes

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has one order."""
        return (self.tiled,)

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`rowlut_gemv`."""
        return rowlut_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, in 16 bit."""
        return self.codes.is_cuda and dtype in HALF_TYPES


def rowlut_gemv(
    x: Tensor,
    operands: Sequence[RowLutOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x and are all tiled or none: one, or q, k and v, or gate and up; their results lie behind each
    other. With `activation` there are two of one size and y = activation(first) * second. `norm` needs one row. `out`
    may be float32 (logits); else the dtype of x. in % 32 == 0; a row that is normed must fit into shared memory beside
    a table of 64 KB, which on cards with 99 KB are 16,000 columns.

    Products are exact, of values as they are stored, sums are f32, rounded once. In bfloat16 what is less than 2^-31 of
    the largest of its row of x counts to within 2^-39 of that, and a row that holds infinity or NaN gives NaN. The same
    bits run after run for as many rows of x, whatever the others are. Raises ValueError by the argument's name.

    Memory-bound: `rowlut_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "rowlut_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    for matrix in operands:
        _check_matrix(op, matrix, x.device, COLUMNS)
        gemv.check_columns(op, x, matrix.in_features)
        if matrix.tiled != operands[0].tiled:
            raise ValueError(f"{op}: some matrices are tiled and some are not")
    out, arguments = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "codes", operands[0].codes)
    matrices = [_arguments(each) for each in operands]
    kernels.module().rowlut_gemv(matrices=matrices, **arguments, **place(x))
    return out


def rowlut_gemv_bytes(rows: int, out: int, columns: int, itemsize: int = 2) -> int:
    """Bytes that `rowlut_gemv` must move: codes and tables once, x once, y once."""
    return out * columns // 2 + 2 * VALUES * out + itemsize * rows * (out + columns)


def rowlut_dequantize(matrix: RowLutOperand, first: int, out: Tensor) -> Tensor:
    """Rows of `matrix` from `first` on into `out` [count, in] of f16, bf16 or f32, and `out`; in % 8 == 0.

    Bit for bit `squeezellm.dequantize`. Memory-bound: `rowlut_dequantize_bytes`. Raises ValueError by name.
    """
    op = "rowlut_dequantize"
    if out.dim() != 2 or out.shape[1] != matrix.in_features or len(out) < 1:
        raise ValueError(f"{op}: out has shape {tuple(out.shape)}, must be [count, {matrix.in_features}]")
    if not 0 <= first <= matrix.out_features - len(out):
        raise ValueError(f"{op}: rows {first} .. {first + len(out) - 1} of {matrix.out_features}")
    _check_matrix(op, matrix, out.device, WORD)
    check(op, "out", out, out.device, tuple(TYPES), out.numel())
    check_cuda(op, "codes", matrix.codes)
    kernels.module().rowlut_dequantize(
        matrix=_arguments(matrix),
        **slab_arguments(first, out),
        **place(out),
    )
    return out


def rowlut_dequantize_bytes(out: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes that `rowlut_dequantize` must move: codes and tables once, the weights once."""
    return out * columns // 2 + 2 * VALUES * out + dtype.itemsize * out * columns


def _arguments(matrix: RowLutOperand) -> dict[str, int]:
    """The fields that csrc/rowlut/bind.cpp reads, by name."""
    return {
        **addresses(codes=matrix.codes, table=matrix.table),
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
        "tiled": matrix.tiled,
    }


def _check_matrix(op: str, matrix: RowLutOperand, device: torch.device, step: int) -> None:
    codes = matrix.codes
    if codes.dim() != 2 or codes.numel() == 0 or matrix.in_features % step:
        shape = tuple(codes.shape)
        raise ValueError(f"{op}: codes have shape {shape}, must be [out, in / 2], in a positive multiple of {step}")
    if matrix.tiled and (codes.shape[0] % GROUP or codes.shape[1] % STEP):
        raise ValueError(
            f"{op}: codes [{codes.shape[0]}, {codes.shape[1]}] cannot be tiled: {GROUP} rows, {STEP} bytes"
        )
    check(op, "codes", codes, device, (torch.uint8,), codes.numel())
    check(op, "table", matrix.table, device, (torch.float16,), VALUES * codes.shape[0])
