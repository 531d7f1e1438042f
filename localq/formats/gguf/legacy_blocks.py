"""Block types of one level of scales: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q1_0, MXFP4, NVFP4.

Bytes of a block, in order; d and m are f16, codes begin with the low bits:

Q4_0    d, 16 code bytes            (code - 8) * d          code byte j: value j in the low nibble, j + 16 in the high
Q4_1    d, m, 16 code bytes         code * d + m
Q5_0    d, 4 high bits, 16 codes    (code - 16) * d         bit i of the 4 bytes is bit 4 of code i
Q5_1    d, m, 4 high bits, 16       code * d + m
Q8_0    d, 32 i8                    code * d
Q1_0    d, 16 sign bytes            d where bit i is set, else -d
MXFP4   E8M0 scale, 16 code bytes   E2M1 * scale
NVFP4   4 UE4M3 scales, 4 x 8       E2M1 * scale            16 values each; byte j: value j low, j + 8 high

Each function writes the f32 values [n, values] of blocks u8 [n, bytes]. Rounding is that of `gguf.quants`; Q1_0, which
it lacks, follows `dequantize_row_q1_0` of ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.formats.gguf import tables
from localq.formats.gguf.bit_fields import fields, halves, look_up, scale_into, spread, subtract_minima, subtract_offset


def _q4_0(blocks: Tensor, values: Tensor) -> None:
    scale_into(values, subtract_offset(fields(blocks[:, None, 2:], 4), 8), halves(blocks, 0))


def _q4_1(blocks: Tensor, values: Tensor) -> None:
    scale_into(values, fields(blocks[:, None, 4:], 4), halves(blocks, 0))
    subtract_minima(values, -halves(blocks, 2))  # a - (-m) is a + m


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """u8 [n, 4] of bits, u8 [n, 16] of nibbles -> u8 [n, 32]."""
    codes = fields(low.unsqueeze(1), 4).flatten(1)
    codes |= spread(tables.flags(0, 16, high.device), high).view(torch.uint8)  # u8 with i8 makes temporaries of i16
    return codes


def _q5_0(blocks: Tensor, values: Tensor) -> None:
    scale_into(values, subtract_offset(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16), halves(blocks, 0))


def _q5_1(blocks: Tensor, values: Tensor) -> None:
    scale_into(values, _five_bits(blocks[:, 4:8], blocks[:, 8:]), halves(blocks, 0))
    subtract_minima(values, -halves(blocks, 2))


def _q8_0(blocks: Tensor, values: Tensor) -> None:
    scale_into(values, blocks[:, 2:].view(torch.int8), halves(blocks, 0))


def _q1_0(blocks: Tensor, values: Tensor) -> None:
    scale_into(values, spread(tables.flags(-1, 1, blocks.device), blocks[:, 2:]), halves(blocks, 0))


def _mxfp4(blocks: Tensor, values: Tensor) -> None:
    codes = look_up(tables.fp4(blocks.device), fields(blocks[:, None, 1:], 4))
    scale_into(values, codes, look_up(tables.e8m0_halved(blocks.device), blocks[:, :1]))


def _nvfp4(blocks: Tensor, values: Tensor) -> None:
    codes = look_up(tables.fp4(blocks.device), fields(blocks[:, 4:].view(-1, 4, 8), 4))
    scale_into(values, codes, look_up(tables.ue4m3_halved(blocks.device), blocks[:, :4]))


UNPACK: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q1_0": _q1_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
