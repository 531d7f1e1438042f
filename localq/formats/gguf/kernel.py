"""Operations on GGUF blocks: checks of the tensors, then the kernel on torch's stream.

All work under CUDA graph capture and allocate nothing but their result. A matrix is in tiled order
(csrc/gguf/layout.cuh; `localq.formats.gguf.tiles` makes it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from localq import kernels
from localq.files.gguf.block_types import by_name
from localq.formats.gguf import tiles
from localq.kernels import gemv
from localq.kernels.checks import TYPES, addresses, check, check_cuda, place, slab_arguments
from localq.kernels.operand import Operand, address, equal

WIDEST = 32_768  # columns of x beside the weights in shared memory, which is 99 KiB on the smallest card


@dataclass(frozen=True)
class GgufOperand(Operand):
    """A matrix [out, in] in GGUF blocks in tiled order.

    blocks   u8 [out, row bytes]
    type     of the blocks, by ggml's name: one of `tiles.TILED_TYPES`
    places   int16 [in/8], the bits of a u16, or None: columns 8i to 8i + 7 of x meet the stored columns from
             8 places[i] on
    factor   multiplies the weights; 1 of all types but NVFP4
    """

    blocks: Tensor
    type: str
    places: Tensor | None = None
    factor: float = 1.0
    shared: ClassVar[tuple[str, ...]] = ("places",)

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.blocks.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        kind = by_name(self.type)
        return self.blocks.shape[1] // kind.bytes * kind.values

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks and places."""
        return self.blocks.nbytes + (0 if self.places is None else self.places.nbytes)

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has blocks of one type, and one x in one order."""
        return self.type, address(self.places)

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`gguf_gemv`."""
        return gguf_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, of the shapes of `reads`."""
        return self.blocks.is_cuda and reads(self)

    def halves(self) -> tuple[GgufOperand, GgufOperand] | None:
        """Cut between tiles."""
        half = self.out_features // 2
        if self.out_features % 2 or half % tiles.ROWS:
            return None
        biases = (None, None) if self.bias is None else (self.bias[:half], self.bias[half:])
        first, second = (
            replace(self, blocks=self.blocks[rows], bias=bias)
            for rows, bias in zip((slice(None, half), slice(half, None)), biases, strict=True)
        )
        return first, second

    def sharing(self, first: GgufOperand) -> GgufOperand:
        """The order of columns."""
        return replace(self, places=first.places) if equal(self.places, first.places) else self


def reads(matrix: GgufOperand) -> bool:
    """Return whether `gguf_gemv` has a kernel for its type and shape, with one row of x on every card."""
    return tiles.has_tiles(matrix.type, (matrix.out_features, matrix.in_features)) and matrix.in_features <= WIDEST


def gguf_gemv(
    x: Tensor,
    operands: Sequence[GgufOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x, its order and the type of blocks: one, or q, k and v, or gate and up; their results lie behind
    each other. With `activation` there are two of one size and y = activation(first) * second. `norm` needs one row of
    x, in order. `out` may be float32; else the dtype of x. Codes times x are summed in f32, then scaled, rounded once;
    the same bits run after run. Raises ValueError by the argument's name.

    Memory-bound: `gguf_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "gguf_gemv"
    gemv.check_x(op, x, [matrix.blocks for matrix in operands])
    first = operands[0]
    for matrix in operands:
        check_matrix(op, matrix)
        check(op, "blocks", matrix.blocks, x.device, (torch.uint8,), matrix.blocks.numel())
        gemv.check_columns(op, x, matrix.in_features)
        if matrix.type != first.type:
            raise ValueError(f"{op}: blocks are {matrix.type}, those of the first {first.type}")
    out, prepared = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "blocks", first.blocks)
    kernels.module().gguf_gemv(
        matrices=[arguments(matrix) for matrix in operands],
        block_type=by_name(first.type).number,
        **prepared,
        **place(x),
    )
    return out


def gguf_dequantize(matrix: GgufOperand, first: int, out: Tensor) -> Tensor:
    """Dequantize rows from `first` on into `out` [count, in]; `first` and count are multiples of 16.

    Of any float dtype of 16 or 32 bits, columns as stored; bit-exact with `localq.formats.gguf.codec`.

    Memory-bound: `gguf_dequantize_bytes` over the memory bandwidth is the floor.
    """
    op = "gguf_dequantize"
    check_matrix(op, matrix)
    check(op, "out", out, matrix.blocks.device, tuple(TYPES), out.shape[0] * matrix.in_features)
    check_cuda(op, "blocks", matrix.blocks)
    kernels.module().gguf_dequantize(
        matrix=arguments(matrix),
        block_type=by_name(matrix.type).number,
        **slab_arguments(first, out),
        **place(matrix.blocks),
    )
    return out


def gguf_weight_bytes(out: int, columns: int, type: str) -> int:
    """Bytes of the blocks."""
    kind = by_name(type)
    return out * columns // kind.values * kind.bytes


def gguf_gemv_bytes(rows: int, out: int, columns: int, type: str, itemsize: int = 2) -> int:
    """Bytes that `gguf_gemv` must move: weights once, x once, y once."""
    return gguf_weight_bytes(out, columns, type) + itemsize * rows * (out + columns)


def gguf_dequantize_bytes(out: int, columns: int, type: str, dtype: torch.dtype) -> int:
    """Bytes that `gguf_dequantize` must move."""
    return gguf_weight_bytes(out, columns, type) + out * columns * dtype.itemsize


def check_matrix(op: str, matrix: GgufOperand) -> None:
    """Raises ValueError, naming the tensor, unless its blocks are whole tiles of a type with kernels."""
    if matrix.type not in tiles.TILED_TYPES:
        raise ValueError(f"{op}: blocks are {matrix.type}, must be of {', '.join(tiles.TILED_TYPES)}")
    whole = matrix.blocks.dim() == 2 and matrix.blocks.numel() > 0
    if not whole or matrix.out_features % tiles.ROWS or matrix.blocks.shape[1] % by_name(matrix.type).bytes:
        shape = tuple(matrix.blocks.shape)
        raise ValueError(f"{op}: blocks have shape {shape}, must be whole blocks in tiles of {tiles.ROWS} rows")
    check(op, "blocks", matrix.blocks, matrix.blocks.device, (torch.uint8,), matrix.blocks.numel())
    if matrix.places is not None:
        check(op, "places", matrix.places, matrix.blocks.device, (torch.int16,), matrix.in_features // 8)


def arguments(matrix: GgufOperand) -> dict[str, float]:
    """The fields that csrc/gguf/bind.cpp reads, by name."""
    return {
        **addresses(blocks=matrix.blocks, places=matrix.places),
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
        "factor": matrix.factor,
    }
