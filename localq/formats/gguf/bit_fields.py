"""Steps that block types share: fields of bytes, table lookups, and products with the scales of a block.

Blocks are u8 [n, bytes] and contiguous. Codes stay in 8 bits until `scale_into` converts them to f32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.formats.gguf import tables


def halves(blocks: Tensor, at: int, count: int = 1) -> Tensor:
    """`count` f16 numbers from byte `at` of each block, f32 [n, count]."""
    return blocks.view(torch.float16)[:, at // 2 : at // 2 + count].float()


def words(blocks: Tensor, at: int, count: int) -> Tensor:
    """`count` u16 numbers from byte `at` of each block, i32 [n, count]."""
    return blocks.view(torch.int16)[:, at // 2 : at // 2 + count].int().bitwise_and_(0xFFFF)


def fields(stored: Tensor, bits: int) -> Tensor:
    """u8 [n, groups, k] -> u8 [n, groups * 8 / bits, k]: of each group the lowest `bits` of its bytes, then the next.

    `bits` is 1, 2 or 4.
    """
    shifted = [stored >> place if place else stored for place in range(0, 8, bits)]
    return torch.stack(shifted, 2).bitwise_and_(2**bits - 1).flatten(1, 2)


def fields_of_bytes(stored: Tensor, bits: int) -> Tensor:
    """u8 [n, k] -> u8 [n, k * 8 / bits]: the fields of a byte, lowest first, then those of the next byte."""
    return spread(tables.fields(bits, stored.device), stored).view(torch.uint8)


def subtract_offset(codes: Tensor, offset: int) -> Tensor:
    """u8 codes, changed in place -> i8 codes - offset."""
    return codes.view(torch.int8).sub_(offset)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """table [entries], index of any integer type [...] -> entries [...]."""
    return torch.index_select(table, 0, index.flatten().int()).view(index.shape)


def spread(table: Tensor, index: Tensor) -> Tensor:
    """table i64 | i32 | i16 [entries], index [n, k] -> i8 [n, 8k | 4k | 2k]: the bytes of the entries.

    One lookup yields as many values.
    """
    return look_up(table, index).view(torch.int8)


def scale_into(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """codes of 8 bits [n, ...], scales f32 [n, groups] -> values f32 [n, k]: each code times the scale of its group."""
    values.copy_(codes.reshape(values.shape))
    by_group(values, scales).mul_(scales.unsqueeze(2))


def by_group(values: Tensor, scales: Tensor) -> Tensor:
    """values [n, k], scales [n, groups] -> a view of the values [n, groups, k / groups]."""
    groups = scales.shape[1]
    return values.view(-1, groups, values.shape[1] // groups)


def subtract_minima(values: Tensor, minima: Tensor) -> None:
    """values f32 [n, k] less the minimum of their group, minima f32 [n, groups], in place.

    A pass of its own: a fused multiply-add skips the rounding of the product.
    """
    by_group(values, minima).sub_(minima.unsqueeze(2))
