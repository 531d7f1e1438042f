"""Operations on 4-bit weights: checks of the tensors, then the kernel on torch's stream.

All work under CUDA graph capture and allocate nothing but their result. A matrix is in tiled order
(csrc/int4/layout.cuh; `localq.formats.int4.tiles` makes it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, TYPES, NibbleRows, addresses, check, check_cuda, place, slab_arguments
from localq.kernels.operand import Operand, address, equal

ROWS, COLUMNS = 16, 64  # out and in are multiples of them
WIDEST_ORDER = 49_152  # columns of x that are gathered into shared memory, which is 99 KiB on the smallest card
GROUP_COLUMNS = 32  # groups of `int4_gemv` have a multiple of so many columns; those of `int4_dequantize` of 8


@dataclass(frozen=True)
class Int4Operand(NibbleRows, Operand):
    """A matrix [out, in] of 4 bits in tiled order; groups = ceil(in / group).

    codes    u8 [out, in/2]
    scales   float16, bfloat16 or float32 [groups, out]; `int4_gemv` takes the first two
    zeros    u8 [groups, out/2]
    order    int16 [in], the bits of a u16, or None: column k of the codes multiplies column order[k] of x
    group    columns of a group; as many as there are, or more: one group
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None
    group: int
    shared: ClassVar[tuple[str, ...]] = ("order",)

    @property
    def nbytes(self) -> int:
        """Codes, scales, zero points and the order of columns."""
        order = 0 if self.order is None else self.order.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + order

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has one x, in one order, and groups and scales of one kind."""
        return self.group, self.scales.dtype, address(self.order)

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`int4_gemv`."""
        return int4_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, of the shapes and types of `reads`."""
        return self.codes.is_cuda and reads(self)

    def sharing(self, first: Int4Operand) -> Int4Operand:
        """The order of columns."""
        return replace(self, order=first.order) if equal(self.order, first.order) else self


def reads(matrix: Int4Operand) -> bool:
    """Return whether `int4_gemv` has a kernel for its shape, groups, order and type of scales, with one row of x on
    every card."""
    gathers = matrix.order is None or matrix.in_features <= WIDEST_ORDER
    whole = matrix.out_features % ROWS == 0 and matrix.in_features % COLUMNS == 0
    grouped = matrix.group >= GROUP_COLUMNS and (
        matrix.group % GROUP_COLUMNS == 0 or matrix.group >= matrix.in_features
    )
    return whole and grouped and gathers and matrix.scales.dtype in HALF_TYPES


def int4_gemv(
    x: Tensor,
    operands: Sequence[Int4Operand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x, its order and the size of groups: one, or q, k and v, or gate and up; their results lie behind
    each other. With `activation` there are two of one size and y = activation(first) * second. `norm` needs one row,
    `order` so few that x fits into shared memory. `out` may be float32; else the dtype of x. Sums of (code - zero) * x
    in f32, then the scale, rounded once; the same bits run after run. Raises ValueError by the argument's name.

    Memory-bound: `int4_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "int4_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    first = operands[0]
    for matrix in operands:
        check_matrix(op, matrix)
        check(op, "codes", matrix.codes, x.device, (torch.uint8,), matrix.codes.numel())
        gemv.check_columns(op, x, matrix.in_features)
        if not reads(matrix):
            raise ValueError(
                f"{op}: groups of {matrix.group} columns, scales of {matrix.scales.dtype}: must be a multiple of "
                f"{GROUP_COLUMNS} and of 16 bits, and an order be of at most {WIDEST_ORDER} columns"
            )
        if matrix.scales.dtype != first.scales.dtype:
            raise ValueError(f"{op}: scales are {matrix.scales.dtype}, those of the first {first.scales.dtype}")
    out, prepared = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "codes", first.codes)
    kernels.module().int4_gemv(
        matrices=[arguments(matrix) for matrix in operands],
        stored=TYPES[first.scales.dtype],
        **prepared,
        **place(x),
    )
    return out


def int4_dequantize(matrix: Int4Operand, first: int, out: Tensor) -> Tensor:
    """Rows of the weights from `first` on, a multiple of 16, into `out` [count, in] and `out`; count is one as well.

    Columns lie as in the codes: `order` says where they belong. Of any float dtype of 16 or 32 bits; bit-exact with
    `localq.formats.int4.codec`.

    Memory-bound: `int4_dequantize_bytes` over the memory bandwidth is the floor.
    """
    op = "int4_dequantize"
    check_matrix(op, matrix)
    check(op, "out", out, matrix.codes.device, tuple(TYPES), out.shape[0] * matrix.in_features)
    check_cuda(op, "codes", matrix.codes)
    kernels.module().int4_dequantize(
        matrix=arguments(matrix),
        stored=TYPES[matrix.scales.dtype],
        **slab_arguments(first, out),
        **place(matrix.codes),
    )
    return out


def int4_weight_bytes(out: int, columns: int, group: int) -> int:
    """Bytes of codes, 16-bit scales and zero points."""
    groups = -(-columns // group)
    return out * columns // 2 + 2 * groups * out + groups * out // 2


def int4_gemv_bytes(rows: int, out: int, columns: int, group: int, itemsize: int = 2) -> int:
    """Bytes that `int4_gemv` must move: weights once, x once, y once. An order of columns adds 2 for each."""
    return int4_weight_bytes(out, columns, group) + itemsize * rows * (out + columns)


def int4_dequantize_bytes(out: int, columns: int, group: int, dtype: torch.dtype) -> int:
    """Bytes that `int4_dequantize` must move."""
    return int4_weight_bytes(out, columns, group) + out * columns * dtype.itemsize


def check_matrix(op: str, matrix: Int4Operand) -> None:
    """Raises ValueError, naming the tensor, unless all of them have the dtype, size and device that they must."""
    out, columns, device = matrix.out_features, matrix.in_features, matrix.codes.device
    if matrix.codes.dim() != 2 or out % ROWS or columns % COLUMNS or out * columns == 0:
        raise ValueError(f"{op}: the matrix is {(out, columns)}, must be whole tiles of {ROWS} rows, {COLUMNS} columns")
    if matrix.group < 8:
        raise ValueError(f"{op}: groups of {matrix.group} columns, must have 8 or more")
    groups = -(-columns // matrix.group)
    check(op, "codes", matrix.codes, device, (torch.uint8,), out * columns // 2)
    check(op, "scales", matrix.scales, device, tuple(TYPES), groups * out)
    check(op, "zeros", matrix.zeros, device, (torch.uint8,), groups * out // 2)
    if matrix.order is not None:
        check(op, "order", matrix.order, device, (torch.int16,), columns)


def arguments(matrix: Int4Operand) -> dict[str, int]:
    """The fields that csrc/int4/bind.cpp reads, by name."""
    return {
        **addresses(codes=matrix.codes, scales=matrix.scales, zeros=matrix.zeros, order=matrix.order),
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
        "group": matrix.group,
    }
