"""Operands for the tests of the products whose weights lie row by row, in 16, in 8 and in 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localq.formats import squeezellm
from localq.formats.int8.kernel import Int8Operand, int8_gemv
from localq.formats.squeezellm import tiles as squeezellm_tiles
from localq.formats.squeezellm.kernel import RowLutOperand, rowlut_gemv
from localq.kernels import gemv
from localq.kernels.dense import DenseOperand, dense_gemv


@dataclass(frozen=True)
class RowOperand:
    """A matrix as the kernel takes it, and its weights f32 [out, in] by the definition of its format.

    rounded   x -> what the kernel's own roundings may add to the error of a 16-bit product of it
    """

    matrix: Any
    dense: Tensor
    rounded: Callable[[Tensor], float] = lambda x: 0.0


@dataclass(frozen=True)
class RowFormat:
    """`make` (shape, dtype of x, seed, device) -> operand; `gemv`: the product; what columns and rows must be multiples
    of."""

    make: Callable[[tuple[int, int], torch.dtype, int, str], RowOperand]
    gemv: Callable[..., Tensor]
    columns: int
    rows: int = 1

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The least one from there on that the format takes."""
        return -(-rows // self.rows) * self.rows, -(-columns // self.columns) * self.columns

    def shapes(self) -> list[tuple[int, int]]:
        """One result and one load; part of a tile; items whole, short and missing; more results than a block keeps
        shares of at a time (one row: 512 times the multiprocessors); x too wide for shared memory."""
        c = self.columns
        shapes = (
            (1, c), (15, 5 * c), (48, 512), (577, 576), (33, 1088 + c), (1001, 2112 + c), (5003, 4160 + c),
            (77, 28672), (40009, 192 + c), (70001, 3 * c),
        )  # fmt: skip
        return [self.shape(*each) for each in shapes]


def _dense(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: str) -> RowOperand:
    """Some columns and rows are larger than the others, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 0.02
    weight[:, 3::101] *= 20
    weight[::7] *= 5
    stored = weight.to(dtype).to(device)
    return RowOperand(DenseOperand(stored), stored.float())


def _int8(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: str) -> RowOperand:
    """Every code occurs, also -128, which quantize does not write; some scales are 30 times the others."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator).to(device)
    scales = 1e-4 + 2e-4 * torch.rand(shape[0], generator=generator)
    scales[::5] *= 30
    scales = scales.to(device)
    return RowOperand(Int8Operand(codes, scales), codes.float() * scales.unsqueeze(1))


def _rowlut(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: str) -> RowOperand:
    """Every code occurs; tables in any order, with zeros, of one sign, of one value, some 30 times the others."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator).to(device)
    table = torch.randn(shape[0], 16, generator=generator) * 0.02
    table[1::3] = table[1::3].sort(1).values
    table[2::7, 5], table[3::7], table[4::11] = 0.0, table[3::7].abs(), table[4::11, :1]
    table[::5] *= 30
    matrix = RowLutOperand(codes, table.half().to(device))
    return RowOperand(matrix, rowlut_weights(matrix, torch.float32))


def _rowlut_in_tiles(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: str) -> RowOperand:
    made = _rowlut(shape, dtype, seed, device)
    return RowOperand(RowLutOperand(squeezellm_tiles.tile(made.matrix.codes), made.matrix.table, True), made.dense)


def rowlut_weights(matrix: RowLutOperand, dtype: torch.dtype) -> Tensor:
    """[out, in] of `dtype` by the definition of the format."""
    codes = squeezellm_tiles.untile(matrix.codes) if matrix.tiled else matrix.codes
    return squeezellm.dequantize(squeezellm.Packed(codes, matrix.table), dtype)


DENSE = RowFormat(_dense, dense_gemv, 8)
INT8 = RowFormat(_int8, int8_gemv, 16)
ROWLUT = RowFormat(_rowlut, rowlut_gemv, 32)
ROWLUT_TILES = RowFormat(_rowlut_in_tiles, rowlut_gemv, 128, 8)


def normed(x: Tensor, norm: gemv.Norm) -> Tensor:
    """As llama's and gemma's RMSNorm: localq/models/layers.py."""
    if norm.weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x.float(), norm.weight.shape, norm.weight, norm.eps).to(x.dtype)
    return torch.nn.functional.rms_norm(x, norm.weight.shape, None, norm.eps) * norm.weight


def biased(operands: Sequence[Any], biases: Sequence[Tensor | None] | None) -> list[Any]:
    """The operands with these biases."""
    return [replace(each, bias=bias) for each, bias in zip(operands, biases or [None] * len(operands), strict=True)]
