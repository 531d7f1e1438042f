"""Operations on NF4 weights: each checks its tensors, then calls the kernel on torch's current stream.

All work under CUDA graph capture and allocate nothing but their result. A matrix is stored row by row as bitsandbytes
does, or `tiled`: the same bytes in the order in which the kernels read them (csrc/nf4/layout.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, TYPES, addresses, check, check_cuda, check_slab, place
from localq.kernels.operand import Operand, address, equal
from localq.kernels.workspace import Workspace, workspace_of

BLOCK, NESTED_BLOCK, VALUES = 64, 256, 16
TILE_ROWS = 16  # that the tiled order keeps together


@dataclass(frozen=True)
class Nf4Operand(Operand):
    """A matrix [out, in] in NF4, in % 64 == 0. Shapes of codes and absmax count elements only.

    codes          u8  [out*in/2]        the even column is the high nibble
    absmax         u8  [out*in/64], or f32 where nested_absmax is None
    nested_absmax  f32 [ceil(out*in/64/256)]
    nested_map     f32 [256]
    offset         added to every decoded absmax
    code_map       f32 [16]
    tiled          codes and absmax are in the order of csrc/nf4/layout.cuh, "tiled"
    """

    codes: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_map: Tensor | None
    offset: float
    code_map: Tensor
    out_features: int
    in_features: int
    tiled: bool = False
    shared: ClassVar[tuple[str, ...]] = ("nested_map", "code_map")

    @property
    def count(self) -> int:
        """Weights."""
        return self.out_features * self.in_features

    @property
    def nbytes(self) -> int:
        """Codes and scales; the two small tables are left out."""
        return nf4_weight_bytes(self.count, self.nested_absmax is not None)

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has one order and one of each table."""
        return self.tiled, self.code_map.data_ptr(), address(self.nested_map)

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`nf4_gemv`."""
        return nf4_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, in 16 bit."""
        return self.codes.is_cuda and dtype in HALF_TYPES

    def sharing(self, first: Nf4Operand) -> Nf4Operand:
        """Both small tables."""
        code_map = first.code_map if equal(self.code_map, first.code_map) else self.code_map
        nested_map = first.nested_map if equal(self.nested_map, first.nested_map) else self.nested_map
        return replace(self, code_map=code_map, nested_map=nested_map)

    def halves(self) -> tuple[Nf4Operand, Nf4Operand] | None:
        """Cut between tiles, and between the groups of blocks that share a nested scale."""
        rows = self.out_features // 2
        blocks = rows * self.in_features // BLOCK
        if self.out_features % (2 * TILE_ROWS) or (self.nested_absmax is not None and blocks % NESTED_BLOCK):
            return None
        return self._rows(slice(0, rows)), self._rows(slice(rows, self.out_features))

    def _rows(self, rows: slice) -> Nf4Operand:
        weights = slice(rows.start * self.in_features, rows.stop * self.in_features)
        codes, blocks = (slice(weights.start // step, weights.stop // step) for step in (2, BLOCK))
        groups = slice(blocks.start // NESTED_BLOCK, -(-blocks.stop // NESTED_BLOCK))
        return replace(
            self,
            codes=self.codes.view(-1)[codes],
            absmax=self.absmax.view(-1)[blocks],
            nested_absmax=None if self.nested_absmax is None else self.nested_absmax[groups],
            out_features=rows.stop - rows.start,
            bias=None if self.bias is None else self.bias[rows],
        )


def nf4_dequantize(
    matrix: Nf4Operand,
    dtype: torch.dtype,
    out: Tensor | None = None,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """The weights in `dtype` (float16, bfloat16 or float32) -> [out, in], bit-exact with bitsandbytes.

    `rows` = (first, count): only a slab of them; of a tiled matrix at multiples of 16, but for the end.

    Memory-bound: `nf4_dequantize_bytes` over the memory bandwidth is the floor.
    """
    op = "nf4_dequantize"
    check_matrix(op, matrix)
    first, count = check_slab(op, dtype, rows, matrix.out_features)
    if out is None:
        out = torch.empty(count, matrix.in_features, dtype=dtype, device=matrix.codes.device)
    check(op, "out", out, matrix.codes.device, (dtype,), count * matrix.in_features)
    check_cuda(op, "codes", matrix.codes)
    kernels.module().nf4_dequantize(
        matrix=arguments(matrix),
        out=out.data_ptr(),
        type=TYPES[dtype],
        row_begin=first,
        row_count=count,
        **place(matrix.codes),
    )
    return out


def nf4_gemv(
    x: Tensor,
    operands: Sequence[Nf4Operand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x: one, or q, k and v, or gate and up; their results lie behind each other. With `activation` there
    are two of one size and y = activation(first) * second. `norm` needs one row. `out` may be float32 (logits); else
    the dtype of x. Sums in f32, rounded once, the same bits run after run. One row of tiled matrices uses the workspace
    of the current stream (`kernels.workspace`).

    Memory-bound: `nf4_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "nf4_gemv"
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    for matrix in operands:
        gemv.check_columns(op, x, matrix.in_features)
        check_matrix(op, matrix)
    out, prepared = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "codes", operands[0].codes)
    joins = x.shape[0] == 1 and operands[0].tiled  # other launches have whole units only
    workspace = workspace_of(x.device) if joins else Workspace(None)
    kernels.module().nf4_gemv(
        matrices=[arguments(matrix) for matrix in operands],
        workspace=workspace.arguments,
        **prepared,
        **place(x),
    )
    return out


def nf4_gemm(x: Tensor, matrix: Nf4Operand, out: Tensor | None = None) -> Tensor:
    """y = x W^T + bias for 9 and more rows. x [rows, in] float16 or bfloat16 -> [rows, out] of the same type.

    Takes fewer rows as well, for which `nf4_gemv` is faster. Sums in f32, rounded once, the same bits run after run.

    Memory-bound for few rows, then bound by tensor cores: W is read and decoded again for every 64 rows, so that from
    some number of rows on `nf4_dequantize` and cuBLAS are faster (`formats.nf4.crossover`).
    """
    op = "nf4_gemm"
    if x.dim() != 2 or x.shape[0] < 1:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, must be [1 or more, in]")
    rows, columns = x.shape
    if matrix.in_features != columns:
        raise ValueError(f"{op}: x has {columns} columns, the matrix has {matrix.in_features}")
    check_matrix(op, matrix)
    check(op, "x", x, matrix.codes.device, HALF_TYPES, rows * columns)
    bias = matrix.bias
    if bias is not None:
        check(op, "bias", bias, x.device, (x.dtype,), matrix.out_features)
    if out is None:
        out = torch.empty(rows, matrix.out_features, dtype=x.dtype, device=x.device)
    check(op, "out", out, x.device, (x.dtype,), rows * matrix.out_features)
    check_cuda(op, "codes", matrix.codes)
    kernels.module().nf4_gemm(
        x=x.data_ptr(),
        matrix=arguments(matrix),
        bias=0 if bias is None else bias.data_ptr(),
        y=out.data_ptr(),
        type=TYPES[x.dtype],
        rows=rows,
        **place(x),
    )
    return out


def nf4_weight_bytes(count: int, nested: bool = True) -> int:
    """Bytes that `count` NF4 weights are read from: codes and scales; the two small tables are left out."""
    blocks = count // BLOCK
    scales = blocks + 4 * -(-blocks // NESTED_BLOCK) if nested else 4 * blocks
    return count // 2 + scales


def nf4_dequantize_bytes(shape: tuple[int, int], dtype: torch.dtype, nested: bool = True) -> int:
    """Bytes that `nf4_dequantize` must move."""
    return nf4_weight_bytes(math.prod(shape), nested) + math.prod(shape) * dtype.itemsize


def nf4_gemv_bytes(rows: int, out: int, columns: int, nested: bool = True, itemsize: int = 2) -> int:
    """Bytes that `nf4_gemv` must move: weights once, x once, y once."""
    return nf4_weight_bytes(out * columns, nested) + itemsize * rows * (out + columns)


def nf4_gemm_bytes(rows: int, out: int, columns: int, nested: bool = True, itemsize: int = 2) -> int:
    """Bytes that `nf4_gemm` must move: those of `nf4_gemv`, whatever the number of rows."""
    return nf4_gemv_bytes(rows, out, columns, nested, itemsize)


def check_matrix(op: str, matrix: Nf4Operand) -> None:
    """Raises ValueError, naming the tensor, unless all of them have the dtype, size and device that they must."""
    if matrix.in_features % BLOCK or matrix.count <= 0:
        shape = (matrix.out_features, matrix.in_features)
        raise ValueError(f"{op}: the matrix is {shape}, its columns must be a positive multiple of {BLOCK}")
    blocks, device = matrix.count // BLOCK, matrix.codes.device
    check(op, "codes", matrix.codes, device, (torch.uint8,), matrix.count // 2)
    check(op, "code_map", matrix.code_map, device, (torch.float32,), VALUES)
    if matrix.nested_absmax is None:
        check(op, "absmax", matrix.absmax, device, (torch.float32,), blocks)
        return
    if matrix.nested_map is None:
        raise ValueError(f"{op}: nested_map is None, must be given with nested_absmax")
    check(op, "absmax", matrix.absmax, device, (torch.uint8,), blocks)
    check(op, "nested_absmax", matrix.nested_absmax, device, (torch.float32,), -(-blocks // NESTED_BLOCK))
    check(op, "nested_map", matrix.nested_map, device, (torch.float32,), NESTED_BLOCK)


def arguments(matrix: Nf4Operand) -> dict[str, int | float]:
    """The fields that csrc/nf4/bind.cpp reads, by name."""
    return {
        **addresses(
            codes=matrix.codes,
            absmax=matrix.absmax,
            nested_absmax=matrix.nested_absmax,
            nested_map=None if matrix.nested_absmax is None else matrix.nested_map,
        ),
        "offset": float(matrix.offset),
        "code_map": matrix.code_map.data_ptr(),
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
        "tiled": matrix.tiled,
    }
