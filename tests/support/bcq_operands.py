"""Matrices in binary codes for the tests of their products, and their weights beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.kernels.bcq import BcqMatrix
from localq.quant import bcq_codec, bcq_tiles
from localq.quant.bcq_codec import Packed


@dataclass(frozen=True)
class BcqOperand:
    """A matrix as the kernel takes it, its weights f32 [out, in] by the definition, and how it is stored."""

    matrix: BcqMatrix
    dense: Tensor
    packed: Packed


def random_packed(shape: tuple[int, int], planes: int, group: int, zero_point: bool, seed: int = 0) -> Packed:
    """Random signs and scales, some of them of either sign, zero, or larger than the others. group 0: all columns."""
    generator = torch.Generator().manual_seed(seed)
    out, columns = shape
    codes = torch.randint(256, (out, planes, columns // 8), dtype=torch.uint8, generator=generator)
    layers = planes + zero_point
    scales = 0.05 * torch.randn(out, layers, -(-columns // (group or columns)), generator=generator)
    scales[::5] *= 8
    scales[1::7, 0] = 0
    return Packed(codes, scales.half())


def operand_of(packed: Packed, device: str = "cpu") -> BcqOperand:
    """`packed` in tiles, on `device`."""
    there = packed.to(device)
    matrix = BcqMatrix(
        bcq_tiles.tile_codes(there.codes),
        bcq_tiles.tile_scales(there.scales),
        bcq_tiles.sign_fragments(there.codes.device),
        packed.planes,
        packed.zero_point,
        packed.group,
        *packed.shape,
    )
    return BcqOperand(matrix, bcq_codec.dequantize(packed, torch.float32).to(device), packed)


def make(shape: tuple[int, int], planes: int, group: int, zero_point: bool = False, seed: int = 0,
         device: str = "cpu") -> BcqOperand:  # fmt: skip
    """See `random_packed`."""
    return operand_of(random_packed(shape, planes, group, zero_point, seed), device)


def _of_positions(packed: Packed) -> Tensor:
    """f64 [out, layers, in/8]"""
    return packed.scales.double().repeat_interleave(packed.group // 8, 2)[..., : packed.codes.shape[2]]


def by_tables(operand: BcqOperand, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product as the kernel rounds it, but for its sums, and the sums of magnitudes: x [rows, in] -> two of f32
    [rows, out]. Sums of eight signed x in f16, at the scale of the row; every code is looked up once."""
    packed = operand.packed
    largest = x.float().abs().amax(1, keepdim=True)
    up = torch.exp2(14 - torch.floor(torch.log2(largest))).double()
    eights = (x.double() * up).unflatten(1, (-1, 8))
    signs = (2 * (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1) - 1).double()
    entries = 8 * (eights @ signs.T / 8).half().double()  # [rows, positions, 256]
    scale = _of_positions(packed)
    sums, sizes = torch.zeros(2, x.shape[0], packed.shape[0], dtype=torch.float64)
    for row, table in enumerate(entries):
        for plane in range(packed.planes):
            found = table[torch.arange(table.shape[0]), packed.codes[:, plane].long()] * scale[:, plane]
            sums[row] += found.sum(1)
            sizes[row] += found.abs().sum(1)
        if packed.zero_point:
            found = eights[row].sum(-1) * scale[:, -1]
            sums[row] += found.sum(1)
            sizes[row] += found.abs().sum(1)
    return (sums / up).float(), (sizes / up).float()


def rounding_of_tables(operand: BcqOperand, x: Tensor) -> float:
    """What entries in f16 may add to the error of a product: each is off by up to 2^-11 of itself, which adds up like
    the steps of a walk; four deviations of the worst result. x [rows, in], on any device."""
    packed = operand.packed
    eights = x.cpu().double().unflatten(1, (-1, 8))
    scale = _of_positions(packed)
    signs = (2 * bcq_codec.unpacked(packed.codes).double() - 1).unflatten(2, (-1, 8))
    squares = torch.zeros(x.shape[0], packed.shape[0], dtype=torch.float64)
    for row, eight in enumerate(eights):
        entries = (signs * eight).sum(-1) * scale[:, : packed.planes]  # [out, planes, positions]
        squares[row] = entries.square().sum((1, 2))
    return 4 * (2**-11 / math.sqrt(3) * squares.sqrt()).max().item()
