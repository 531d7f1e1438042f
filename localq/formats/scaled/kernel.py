"""Operations on weights with scales apart from their codes: checks of the tensors, then the kernel on torch's stream.

All work under CUDA graph capture and allocate nothing but their result. A matrix is in tiled order
(csrc/scaled/layout.cuh; `localq.formats.scaled.tiles` makes it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import TYPES, addresses, check, check_cuda, place
from localq.kernels.operand import Operand

ROWS = 16  # of a tile
WIDEST = 32_768  # columns of x beside the weights in shared memory, which is 99 KiB on the smallest card


@dataclass(frozen=True)
class ScaledKind:
    """Kind of a matrix: the layout of its codes and scales.

    number         in csrc/scaled/scaled.h
    codes_a_byte   2 for codes of 4 bits
    columns        of a tile block: in is a multiple of it
    scale_bytes, zero_bytes   of a tile block of 16 rows
    factors        "matrix": one factor; "rows": one for each row; "": none
    """

    number: int
    columns: int
    codes_a_byte: int = 1
    scale_bytes: int = 0
    zero_bytes: int = 0
    factors: Literal["", "matrix", "rows"] = ""

    def bytes(self, out: int, columns: int) -> int:
        """Bytes of codes, scales, zero points and factors of a matrix [out, columns]."""
        blocks = out // ROWS * (columns // self.columns)
        own = blocks * (self.scale_bytes + self.zero_bytes) + 4 * self.factor_count(out)
        return out * columns // self.codes_a_byte + own

    def factor_count(self, out: int) -> int:
        """Factors of a matrix of `out` rows."""
        return {"": 0, "matrix": 1, "rows": out}[self.factors]


KINDS = {
    "nvfp4": ScaledKind(0, 64, codes_a_byte=2, scale_bytes=64, factors="matrix"),
    "fp8 blocks": ScaledKind(1, 64, scale_bytes=4),
    "fp8 rows": ScaledKind(2, 64, factors="rows"),
    "int8 rows": ScaledKind(3, 32, factors="rows"),
    "int8 g32": ScaledKind(4, 32, scale_bytes=64, zero_bytes=16),
    "int8 g64": ScaledKind(5, 64, scale_bytes=64, zero_bytes=16),
    "int8 g128": ScaledKind(6, 128, scale_bytes=64, zero_bytes=16),
}


@dataclass(frozen=True)
class ScaledOperand(Operand):
    """A matrix [out, in] in tiled order, of one of `KINDS`.

    codes    u8 [out, in/2] or [out, in]
    scales   nvfp4: u8 [out, in/16], the bits of e4m3. "fp8 blocks": f32 [out/16, in/64]. "int8 gN": f32 [in/N, out]
    zeros    "int8 gN": u8 [in/N, out]
    factors  nvfp4: f32 [1]. Kinds of rows: f32 [out]. Multiplies the weights
    divides  the factor divides the weights instead
    through  the type to which the definition rounds weights first: float32 for none
    """

    kind: str
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    factors: Tensor | None
    divides: bool = False
    through: torch.dtype = torch.float32

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.codes.shape[1] * KINDS[self.kind].codes_a_byte

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = (self.codes, self.scales, self.zeros, self.factors)
        return sum(each.nbytes for each in held if each is not None)

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has matrices of one kind."""
        return (self.kind,)

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`scaled_gemv`."""
        return scaled_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, of the shapes of `reads`."""
        return self.codes.is_cuda and reads(self)


def fits(kind: str, out: int, columns: int) -> bool:
    """Return whether a matrix [out, in] has the tiled order: whole tiles of whole blocks."""
    return out > 0 and out % ROWS == 0 and columns > 0 and columns % KINDS[kind].columns == 0


def reads(matrix: ScaledOperand) -> bool:
    """Return whether `scaled_gemv` has a kernel for its shape, with one row of x on every card."""
    return fits(matrix.kind, matrix.out_features, matrix.in_features) and matrix.in_features <= WIDEST


def scaled_gemv(
    x: Tensor,
    operands: Sequence[ScaledOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x and their kind: one, or q, k and v, or gate and up; their results lie behind each other. With
    `activation` there are two of one size and y = activation(first) * second. `norm` needs one row of x. `out` may be
    float32; else the dtype of x. Sums of codes times x in f32, then scaled, rounded once; the same bits run after run.
    Raises ValueError by the argument's name.

    Memory-bound: `scaled_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "scaled_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    first = operands[0]
    for matrix in operands:
        check_matrix(op, matrix)
        check(op, "codes", matrix.codes, x.device, (torch.uint8,), matrix.codes.numel())
        if matrix.in_features != x.shape[1]:
            raise ValueError(f"{op}: x has {x.shape[1]} columns, a matrix has {matrix.in_features}")
        if matrix.kind != first.kind:
            raise ValueError(f"{op}: a matrix is {matrix.kind}, the first is {first.kind}")
    out, prepared = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "codes", first.codes)
    kernels.module().scaled_gemv(
        matrices=[arguments(matrix) for matrix in operands], kind=KINDS[first.kind].number, **prepared, **place(x)
    )
    return out


def scaled_dequantize(matrix: ScaledOperand, first: int, out: Tensor) -> Tensor:
    """Rows of the weights from `first` on, a multiple of 16, into `out` [count, in] and `out`; count is one as well.

    Of any float dtype of 16 or 32 bits; bit-exact with the definitions of the formats.

    Memory-bound: `scaled_dequantize_bytes` over the memory bandwidth is the floor.
    """
    op = "scaled_dequantize"
    check_matrix(op, matrix)
    check(op, "out", out, matrix.codes.device, tuple(TYPES), out.shape[0] * matrix.in_features)
    check_cuda(op, "codes", matrix.codes)
    kernels.module().scaled_dequantize(
        matrix=arguments(matrix),
        kind=KINDS[matrix.kind].number,
        out=out.data_ptr(),
        type=TYPES[out.dtype],
        row_begin=first,
        row_count=out.shape[0],
        **place(matrix.codes),
    )
    return out


def scaled_gemv_bytes(kind: str, rows: int, out: int, columns: int, itemsize: int = 2) -> int:
    """Bytes that `scaled_gemv` must move: weights once, x once, y once."""
    return KINDS[kind].bytes(out, columns) + itemsize * rows * (out + columns)


def scaled_dequantize_bytes(kind: str, out: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes that `scaled_dequantize` must move."""
    return KINDS[kind].bytes(out, columns) + out * columns * dtype.itemsize


def check_matrix(op: str, matrix: ScaledOperand) -> None:
    """Raises ValueError, naming the tensor, unless all of them have the dtype, size and device that they must."""
    if matrix.kind not in KINDS:
        raise ValueError(f"{op}: the matrix is {matrix.kind!r}, must be of {', '.join(KINDS)}")
    kind, codes = KINDS[matrix.kind], matrix.codes
    if codes.dim() != 2 or not fits(matrix.kind, matrix.out_features, matrix.in_features):
        shape = tuple(codes.shape)
        raise ValueError(f"{op}: codes have shape {shape}, must be whole tiles of {ROWS} rows, {kind.columns} columns")
    out, device = matrix.out_features, codes.device
    blocks = out // ROWS * (matrix.in_features // kind.columns)
    check(op, "codes", codes, device, (torch.uint8,), codes.numel())
    if kind.scale_bytes:
        scale_type = torch.uint8 if kind.codes_a_byte == 2 else torch.float32
        if matrix.scales is None:
            raise ValueError(f"{op}: scales is None, {matrix.kind} has scales")
        check(op, "scales", matrix.scales, device, (scale_type,), blocks * kind.scale_bytes // scale_type.itemsize)
    if kind.zero_bytes:
        if matrix.zeros is None:
            raise ValueError(f"{op}: zeros is None, {matrix.kind} has zero points")
        check(op, "zeros", matrix.zeros, device, (torch.uint8,), blocks * kind.zero_bytes)
    if count := kind.factor_count(out):
        if matrix.factors is None:
            raise ValueError(f"{op}: factors is None, {matrix.kind} has factors")
        check(op, "factors", matrix.factors, device, (torch.float32,), count)


def arguments(matrix: ScaledOperand) -> dict[str, int]:
    """The fields that csrc/scaled/bind.cpp reads, by name."""
    return {
        **addresses(codes=matrix.codes, scales=matrix.scales, zeros=matrix.zeros, factors=matrix.factors),
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
        "by_row": KINDS[matrix.kind].factors == "rows",
        "divides": matrix.divides,
        "through": TYPES[matrix.through],
    }
