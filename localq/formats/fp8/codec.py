"""FP8 matrices in memory: `Packed`, dequantized by `fp8_source`; random weights. Specified in `formats.fp8`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.formats import fp8_source
from localq.formats.fp8_source import STORED
from localq.formats.samples import Random

NOT_A_NUMBER = 0x7F  # without the sign


@dataclass(frozen=True)
class Packed:
    """One matrix: codes u8 [out, in], the bits of e4m3; scales f32 [ceil(out / rows), ceil(in / columns)], one for
    every block of rows x columns."""

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`: both tensors where `place` copies them."""
        return replace(self, codes=place(self.codes), scales=place(self.scales))


def refine(packed: Packed, block: tuple[int, int]) -> Packed:
    """The same weights with smaller scale blocks, which divide the old ones evenly."""
    (out, columns), (rows, width) = packed.shape, packed.block
    scales = packed.scales.repeat_interleave(rows // block[0], 0).repeat_interleave(max(width // block[1], 1), 1)
    grid = -(-out // block[0]), -(-columns // block[1])
    return replace(packed, scales=scales[: grid[0], : grid[1]].contiguous(), block=block)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", block: tuple[int, int] = (1, 0)
           ) -> Packed:  # fmt: skip
    """Random weights [out, in] of about unit gain; 0 columns of a block: all."""
    (out, columns), random = shape, Random(seed, device)
    values = random.normal(out, columns, deviation=64.0, dtype=torch.float32).clamp_(-448, 448).to(STORED)
    sides = block[0], block[1] or columns
    grid = -(-out // sides[0]), -(-columns // sides[1])
    scales = random.scales(1 / 64 / columns**0.5, *grid, dtype=torch.float32)
    return Packed(values.view(torch.uint8), scales, sides)


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    return dequantize_rows(packed, 0, torch.empty(packed.shape, dtype=dtype, device=packed.codes.device))


def dequantize_rows(packed: Packed, first: int, out: Tensor) -> Tensor:
    """Rows of the matrix from `first` on into `out` [count, in], and `out`."""
    return fp8_source.dequantize_rows(packed.codes.view(STORED), packed.scales, packed.block, first, out)
