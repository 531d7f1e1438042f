"""Block types of tables: IQ4_NL, IQ4_XS, whose codes select one value, and the IQ types of grids, 4 or 8 at once.

Bytes of a block, in order; d is f16, `s` the scale of a group of 16 or 32 values. IQ4_NL has 32 values, the others 256.

IQ4_NL   d, 16 code bytes                                    value * d; nibbles as in Q4_0
IQ4_XS   d, u16 of high bits, 4 of low nibbles, 128          value * (d * (s - 32))
IQ3_S    d, 64 low bytes, 8 high bits, 32 sign bytes, 4 s    +-grid * (d * (2s + 1))
IQ3_XXS  d, 64 index bytes, 8 u32                            +-grid * (d * (s + 0.5) * 0.5)
IQ2_XXS  d, 8 x (4 index bytes, u32)                         +-grid * (d * (s + 0.5) * 0.25)
IQ2_XS   d, 32 u16, 8 bytes of s                             +-grid * (d * (s + 0.5) * 0.25)
IQ2_S    d, 32 low bytes, 32 sign bytes, 8 high, 8 of s      +-grid * (d * (s + 0.5) * 0.25)
IQ1_S    d, 32 low bytes, 8 u16                              (grid +- 0.125) * (d * (2s + 1))
IQ1_M    32 low bytes, 16 of high bits, 4 u16                (grid +- 0.125) * (d * (2s + 1))

u32 of IQ2_XXS and IQ3_XXS: four indices of 7 bits into the signs, then s. u16 of IQ2_XS: index of 9 bits, then that of
the signs. u16 of IQ1_S: four times 3 high bits of an index, then s, then the sign of 0.125. A nibble of IQ1_M: 3 high
bits of an index, then the sign of 0.125; a u16: four s of 3 bits, then 4 bits of d.

Grid times sign is exact, so that signs are applied to 8-bit numbers; the products are rounded as in `gguf.quants`. Each
function writes the f32 values of blocks u8 [n, bytes].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.formats.gguf import tables
from localq.formats.gguf.bit_fields import (
    by_group,
    fields,
    fields_of_bytes,
    halves,
    look_up,
    scale_into,
    spread,
    subtract_offset,
    words,
)


def _iq4_nl(blocks: Tensor, values: Tensor) -> None:
    codes = look_up(tables.iq4(blocks.device), fields(blocks[:, None, 2:], 4))
    scale_into(values, codes, halves(blocks, 0))


def _iq4_xs(blocks: Tensor, values: Tensor) -> None:
    scales = fields_of_bytes(blocks[:, 4:8], 4)
    scales |= fields_of_bytes(blocks[:, 2:4], 2) << 4
    codes = look_up(tables.iq4(blocks.device), fields(blocks[:, 8:].view(-1, 8, 16), 4))
    scale_into(values, codes, halves(blocks, 0) * subtract_offset(scales, 32))


# ---- grids with signs


def _with_high_bits(low: Tensor, high: Tensor) -> Tensor:
    """u8 [n, k] of low bits, [n, k] of high ones -> i32 [n, k]."""
    return high.int().bitwise_left_shift_(8).bitwise_or_(low)


def _signed_grid(type: str, index: Tensor, sign_table: Tensor, sign_index: Tensor) -> Tensor:
    """index [n, a], sign_index [n, b] -> i8 [n, 256]."""
    found = spread(tables.grid(type, index.device), index)
    found *= spread(sign_table, sign_index)
    return found


def _signs_and_scales(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of 8 u32, i32 [n, 8] -> indices of 7 bits [n, 32], scales [n, 8], i32."""
    word = (high << 16) | low
    signs = torch.stack([(word >> shift) & 127 for shift in (0, 7, 14, 21)], 2)
    return signs.flatten(1), high >> 12


def _iq2_xxs(blocks: Tensor, values: Tensor) -> None:
    index = blocks[:, 2:].view(-1, 8, 8)[:, :, :4].flatten(1)
    word = words(blocks, 2, 32).view(-1, 8, 4)
    signs, scales = _signs_and_scales(word[:, :, 2], word[:, :, 3])
    codes = _signed_grid("IQ2_XXS", index, tables.paired_signs(blocks.device), signs)
    scale_into(values, codes, halves(blocks, 0) * (scales + 0.5) * 0.25)


def _iq2_xs(blocks: Tensor, values: Tensor) -> None:
    word = words(blocks, 2, 32)
    codes = _signed_grid("IQ2_XS", word & 511, tables.paired_signs(blocks.device), word >> 9)
    scale_into(values, codes, halves(blocks, 0) * (fields_of_bytes(blocks[:, 66:], 4) + 0.5) * 0.25)


def _iq2_s(blocks: Tensor, values: Tensor) -> None:
    index = _with_high_bits(blocks[:, 2:34], fields_of_bytes(blocks[:, 66:74], 2))
    codes = _signed_grid("IQ2_S", index, tables.flags(1, -1, blocks.device), blocks[:, 34:66])
    scale_into(values, codes, halves(blocks, 0) * (fields_of_bytes(blocks[:, 74:], 4) + 0.5) * 0.25)


def _iq3_xxs(blocks: Tensor, values: Tensor) -> None:
    word = words(blocks, 66, 16)
    signs, scales = _signs_and_scales(word[:, 0::2], word[:, 1::2])
    codes = _signed_grid("IQ3_XXS", blocks[:, 2:66], tables.paired_signs(blocks.device), signs)
    scale_into(values, codes, halves(blocks, 0) * (scales + 0.5) * 0.5)


def _iq3_s(blocks: Tensor, values: Tensor) -> None:
    index = _with_high_bits(blocks[:, 2:66], fields_of_bytes(blocks[:, 66:74], 1))
    codes = _signed_grid("IQ3_S", index, tables.flags(1, -1, blocks.device), blocks[:, 74:106])
    scale_into(values, codes, halves(blocks, 0) * (2 * fields_of_bytes(blocks[:, 106:], 4) + 1))


# ---- grids with a shift of 1/8


def _scale_shifted_into(values: Tensor, index: Tensor, negative: Tensor, scales: Tensor) -> None:
    """index [n, 32], negative [n, k] of 0 and 1, scales f32 [n, groups] -> values f32 [n, 256].

    (grid +- 1/8) * scale as (8 grid +- 1) * (scale / 8): both factors are exact, so that the product has one rounding.
    """
    codes = spread(tables.grid("IQ1_S", index.device), index).mul_(8)
    shifts = 1 - 2 * negative.to(torch.int8)
    scale_into(values, by_group(codes, shifts).add_(shifts.unsqueeze(2)), scales * 0.125)


def _iq1_s(blocks: Tensor, values: Tensor) -> None:
    word = words(blocks, 34, 8)
    high = torch.stack([(word >> shift) & 7 for shift in (0, 3, 6, 9)], 2).flatten(1)
    index = _with_high_bits(blocks[:, 2:34], high)
    _scale_shifted_into(values, index, word >> 15, halves(blocks, 0) * (2 * ((word >> 12) & 7) + 1))


def _iq1_m(blocks: Tensor, values: Tensor) -> None:
    high = fields_of_bytes(blocks[:, 32:48], 4)
    index = _with_high_bits(blocks[:, :32], high & 7)
    word = words(blocks, 48, 4)
    scales = torch.stack([(word >> shift) & 7 for shift in (0, 3, 6, 9)], 2).flatten(1)
    _scale_shifted_into(values, index, high >> 3, _iq1_m_scale(blocks) * (2 * scales + 1))


def _iq1_m_scale(blocks: Tensor) -> Tensor:
    """d, f32 [n, 1]: the four highest bits of each u16, those of the first one lowest."""
    word = blocks.view(torch.int16)[:, 24:28].T
    bits = ((word[0] >> 12) & 0xF) | ((word[1] >> 8) & 0xF0) | ((word[2] >> 4) & 0xF00)
    bits |= word[3] & -0x1000  # 0xF000 as an i16
    return bits.view(torch.float16).float().unsqueeze(1)


UNPACK: dict[str, Callable[[Tensor, Tensor], None]] = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
