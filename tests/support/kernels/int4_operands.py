"""Operands for the tests of the kernels with 4-bit weights (AWQ, GPTQ)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import tiles as int4_tiles
from localq.formats.int4.codec import Packed
from localq.formats.int4.kernel import Int4Operand


@dataclass(frozen=True)
class Int4Sample:
    """A matrix as its format has it, and as the kernels take it, with tensors of its own."""

    packed: Packed
    matrix: Int4Operand

    @property
    def dense(self) -> Tensor:
        """f32 [out, in], without the rounding to the type of the scales, which products by the kernel do not have."""
        wide = replace(self.packed, scales=self.packed.scales.float())
        return int4_codec.dequantize(wide, torch.float32)


def packed_of(
    shape: tuple[int, int],
    group: int,
    seed: int = 0,
    scales: torch.dtype = torch.float16,
    act_order: bool = False,
) -> Packed:
    """Every code and every zero point occurs; some scales are 30 times the others, some are negative."""
    out, columns = shape
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    values = 0.001 + 0.002 * torch.rand(groups, out, generator=generator)
    values[:, ::7] *= 30
    values[:, 3::11] *= -1
    order = None
    if act_order:
        order = int4_codec.as_order(torch.randperm(columns, generator=generator))
    codes = torch.randint(256, (out, columns // 2), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(256, (groups, out // 2), dtype=torch.uint8, generator=generator)
    return Packed(codes, values.to(scales), zeros, order, group, not act_order)


def operand_of(packed: Packed, device: str = "cpu") -> Int4Sample:
    """A matrix that is there already, on `device`."""
    packed = packed.to(device)
    return Int4Sample(packed, matrix_of(int4_tiles.tile(packed)))


def matrix_of(tiled: Packed) -> Int4Operand:
    """Tiled tensors as the kernels take them; without an order that changes nothing."""
    order = None if tiled.in_order else tiled.order
    return Int4Operand(tiled.codes, tiled.scales, tiled.zeros, order, tiled.group)


def make(shape: tuple[int, int], group: int, seed: int = 0, device: str = "cpu", **kind: object) -> Int4Sample:
    """`packed_of`, on `device`."""
    return operand_of(packed_of(shape, group, seed, **kind), device)  # type: ignore[arg-type]
