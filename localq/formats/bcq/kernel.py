"""Products with matrices in binary codes, and their weights for prefill. Checks, then the kernels (csrc/bcq/gemv.cu).

Works under CUDA graph capture and allocates nothing but its result. What a matrix must look like (codes and scales in
tiles) is made by `formats.bcq.tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, addresses, check, check_cuda, place, slab_arguments
from localq.kernels.operand import Operand

PLANES, TILE = 5, 16  # of one matrix, at most; rows of a tile
SMALLEST_GROUP = 32  # columns that share a scale
COLUMNS = 8  # signs of a code; a matrix has a multiple of them
BLOCK = 128  # columns that codes are padded to


@dataclass(frozen=True)
class BcqOperand(Operand):
    """A matrix [out, in] in binary codes, in % 8 == 0.

    codes       u8 [ceil(out/16) * planes * ceil(in/128) * 256], in tiles: [tile][block of 128 columns][plane][row g of
                8][word of 32 columns][rows g and g + 8], bit i of a word set where column i of its 32 has a +
    scales      f16 [ceil(out/16) * layers * groups * 16]: in each tile [group][plane][row g][rows g and g + 8], then
                the zero points [group][row g][..]
    zero_point  is there one?
    group       columns that share a scale: in, or a power of two from 32 on, of which the last group may lack some
    """

    codes: Tensor
    scales: Tensor
    planes: int
    zero_point: bool
    group: int
    out_features: int
    in_features: int

    @property
    def layers(self) -> int:
        """Scales of a group: one for each plane, and the zero point."""
        return self.planes + self.zero_point

    @property
    def groups(self) -> int:
        """Of a row."""
        return -(-self.in_features // self.group)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it."""
        codes = self.out_features * self.planes * (self.in_features // COLUMNS)
        return codes + 2 * self.out_features * self.layers * self.groups

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has planes and groups of one kind."""
        return self.planes, self.zero_point, self.group

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`bcq_gemv`."""
        return bcq_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, in 16 bit."""
        return self.codes.is_cuda and dtype in HALF_TYPES


def bcq_gemv(
    x: Tensor,
    operands: Sequence[BcqOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x and have as many planes and groups: one, or q, k and v, or gate and up; their results lie behind
    each other. With `activation` there are two of one size and y = activation(first) * second. `norm` needs one row.
    `out` may be float32 (logits); else the dtype of x. x is rounded to 2^-15 of the largest of its 128 columns or
    better, what is added up of it exact until a scale multiplies it, in f32, and rounded once; the same bits run after
    run. Raises ValueError by the argument's name.

    Memory-bound: `bcq_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "bcq_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    for matrix in operands:
        check_matrix(op, matrix, x)
    out, arguments = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "codes", operands[0].codes)
    kernels.module().bcq_gemv(
        matrices=[_arguments(matrix) for matrix in operands],
        **arguments,
        **place(x),
    )
    return out


def bcq_gemv_bytes(
    rows: int, out: int, columns: int, planes: int = 3, group: int = 128, layers: int = 0, itemsize: int = 2
) -> int:
    """Bytes that `bcq_gemv` must move: codes and scales once, x once, y once.

    layers  scales of a group; 0: as many as planes
    """
    scales = (layers or planes) * -(-columns // group)
    return out * (planes * columns // COLUMNS + 2 * scales) + itemsize * rows * (out + columns)


def bcq_dequantize(matrix: BcqOperand, first: int, out: Tensor) -> Tensor:
    """Rows of `matrix` from `first` on, a multiple of 16, into `out` [count, in] of f16 or bf16, and `out`.

    Bit for bit what `formats.bcq` defines. Memory-bound: `bcq_dequantize_bytes`. Raises ValueError by name.
    """
    op = "bcq_dequantize"
    if out.dim() != 2 or out.shape[1] != matrix.in_features or len(out) < 1:
        raise ValueError(f"{op}: out has shape {tuple(out.shape)}, must be [count, {matrix.in_features}]")
    if first % TILE or not 0 <= first <= matrix.out_features - len(out):
        raise ValueError(f"{op}: rows {first} .. {first + len(out) - 1} of {matrix.out_features}, in tiles of {TILE}")
    check_matrix(op, matrix, out)
    check(op, "out", out, matrix.codes.device, HALF_TYPES, out.numel())
    check_cuda(op, "codes", matrix.codes)
    kernels.module().bcq_dequantize(
        matrix=_arguments(matrix),
        **slab_arguments(first, out),
        **place(out),
    )
    return out


def bcq_dequantize_bytes(out: int, columns: int, planes: int = 3, group: int = 128) -> int:
    """Bytes that `bcq_dequantize` must move: codes and scales once, the weights once."""
    return out * columns * planes // 8 + 2 * planes * out * -(-columns // group) + 2 * out * columns


def check_matrix(op: str, matrix: BcqOperand, x: Tensor) -> None:
    """Raises ValueError, naming the tensor, unless `matrix` is one that the kernels read beside x [rows, in]."""
    out, columns, group = matrix.out_features, matrix.in_features, matrix.group
    gemv.check_columns(op, x, columns)
    if out <= 0 or columns <= 0 or columns % COLUMNS:
        raise ValueError(f"{op}: the matrix is {(out, columns)}, its columns must be a positive multiple of {COLUMNS}")
    if not 1 <= matrix.planes <= PLANES:
        raise ValueError(f"{op}: planes = {matrix.planes}, must be from 1 to {PLANES}")
    if group != columns and not (SMALLEST_GROUP <= group < columns and group & (group - 1) == 0):
        raise ValueError(f"{op}: group = {group} of {columns} columns, must be all or a power of two from 32 on")
    tiles = -(-out // TILE)
    held = tiles * TILE * matrix.planes * -(-columns // BLOCK) * (BLOCK // COLUMNS)
    check(op, "codes", matrix.codes, x.device, (torch.uint8,), held)
    check(op, "scales", matrix.scales, x.device, (torch.float16,), tiles * TILE * matrix.layers * matrix.groups)


def _arguments(matrix: BcqOperand) -> dict[str, int]:
    """The fields that csrc/bcq/bind.cpp reads, by name."""
    return {
        **addresses(codes=matrix.codes, scales=matrix.scales),
        "planes": matrix.planes,
        "zero_point": matrix.zero_point,
        "group": matrix.group,
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
    }
