"""Matrices in binary codes for the tests of their products, and their weights beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq.formats.bcq import codec as bcq_codec
from localq.formats.bcq import tiles as bcq_tiles
from localq.formats.bcq.codec import Packed
from localq.formats.bcq.kernel import BcqOperand


@dataclass(frozen=True)
class BcqSample:
    """A matrix as the kernel takes it, its weights f32 [out, in] by the definition, and how it is stored."""

    matrix: BcqOperand
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


def operand_of(packed: Packed, device: str = "cpu") -> BcqSample:
    """`packed` in tiles, on `device`."""
    there = packed.to(device)
    matrix = BcqOperand(
        bcq_tiles.tile_codes(there.codes),
        bcq_tiles.tile_scales(there.scales, packed.planes),
        packed.planes,
        packed.zero_point,
        packed.group,
        *packed.shape,
    )
    return BcqSample(matrix, bcq_codec.dequantize(packed, torch.float32).to(device), packed)


def make(shape: tuple[int, int], planes: int, group: int, zero_point: bool = False, seed: int = 0,
         device: str = "cpu") -> BcqSample:  # fmt: skip
    """See `random_packed`."""
    return operand_of(random_packed(shape, planes, group, zero_point, seed), device)


def by_bits(operand: BcqSample, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product as the kernel rounds it, but for its sums, and the sums of magnitudes: x [rows, in] -> two of f32
    [rows, out]. 128 columns of x are 16 bits of fixed point each, the largest between 2^14 and 2^15."""
    held = _in_bits(x)
    dense = bcq_codec.dequantize(operand.packed, torch.float64)
    scales = operand.packed.scales.double().abs().sum(1).repeat_interleave(operand.packed.group, 1)
    sizes = held.abs() @ scales[:, : x.shape[1]].T
    return (held @ dense.T).float(), sizes.float()


def _in_bits(x: Tensor) -> Tensor:
    """x f64 [rows, in] as the kernel has it."""
    last = _last_bit(x)
    return (x.double().cpu() / last).round() * last


def _last_bit(x: Tensor) -> Tensor:
    """f64 [rows, in]: what the last of the 16 bits of each value is worth."""
    blocks = torch.nn.functional.pad(x.double().cpu(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    largest = blocks.abs().amax(2, keepdim=True).clamp_min(2.0**-126)
    return torch.exp2(torch.floor(torch.log2(largest)) - 14).expand_as(blocks).flatten(1)[:, : x.shape[1]]


def rounding_of_bits(operand: BcqSample, x: Tensor) -> float:
    """What x in bits may add to the error of a product: each value is off by up to half of the last bit, which adds up
    like the steps of a walk; four deviations of the worst result. x [rows, in], on any device."""
    squares = _last_bit(x).square() @ operand.dense.cpu().double().square().T / 12
    return 4 * squares.sqrt().max().item()
