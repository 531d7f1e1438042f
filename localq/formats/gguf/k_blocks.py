"""Block types of two levels of scales, the K quants: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K; 256 values in 8 or 16 groups.

Bytes of a block, in order; d and dmin are f16, `s` and `m` the scale and the minimum of a group:

Q2_K    16 x (s low, m high nibble), 64 code bytes, d, dmin             code * (d * s) - dmin * m
Q3_K    32 high bits, 64 code bytes, 12 scale bytes, d                  (code - 4) * (d * (s - 32))
Q4_K    d, dmin, 12 scale bytes, 128 code bytes                         code * (d * s) - dmin * m
Q5_K    d, dmin, 12 scale bytes, 32 high bits, 128 code bytes           code * (d * s) - dmin * m
Q6_K    128 bytes of low nibbles, 64 of high bits, 16 i8 scales, d      (code - 32) * (d * s)

Codes, high bits and the scales of Q3_K lie across bytes: of each 32 bytes (64 of the low nibbles of Q6_K; 8 and 4 scale
bytes of Q3_K) the lowest bits are the first values, byte by byte, the next bits the next values.

Every product and difference is rounded to f32, as in `gguf.quants`. Each function writes the f32 values [n, 256] of
blocks u8 [n, bytes].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.formats.gguf.bit_fields import fields, halves, scale_into, subtract_minima, subtract_offset


def _q2_k(blocks: Tensor, values: Tensor) -> None:
    scales = blocks[:, :16]
    codes = fields(blocks[:, 16:80].view(-1, 2, 32), 2)
    scale_into(values, codes, halves(blocks, 80) * (scales & 15))
    subtract_minima(values, halves(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Tensor, values: Tensor) -> None:
    codes = fields(blocks[:, 32:96].view(-1, 2, 32), 2)
    codes |= fields(blocks[:, None, :32], 1) << 2
    stored = blocks[:, 96:108].T.contiguous()  # as in `_scales_and_minima`
    scales = fields(stored[:8].view(1, 1, -1), 4)  # the low 4 bits of 16 scales
    scales |= fields(stored[8:].view(1, 1, -1), 2).view(scales.shape) << 4
    scales = subtract_offset(scales, 32).view(16, len(blocks)).T
    scale_into(values, subtract_offset(codes, 4), halves(blocks, 108) * scales)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks with 12 scale bytes from byte 4 on -> 8 scales and 8 minima of 6 bits, u8 [n, 8] each.

    Of groups 0 to 3 bytes 0 to 3 hold the scales and 4 to 7 the minima; of groups 4 to 7 bytes 8 to 11 hold the low
    nibbles of both, and the two bits on top of the others the high bits.
    """
    stored = blocks[:, 4:16].T.contiguous()  # rows of n bytes: loops over 4 bytes take longer than all else
    scales, minima, low = stored[:4], stored[4:8], stored[8:]
    return (
        torch.cat((scales & 63, (low & 15) | ((scales >> 2) & 48))).T,
        torch.cat((minima & 63, (low >> 4) | ((minima >> 2) & 48))).T,
    )


def _q4_k(blocks: Tensor, values: Tensor) -> None:
    scales, minima = _scales_and_minima(blocks)
    scale_into(values, fields(blocks[:, 16:].view(-1, 4, 32), 4), halves(blocks, 0) * scales)
    subtract_minima(values, halves(blocks, 2) * minima)


def _q5_k(blocks: Tensor, values: Tensor) -> None:
    scales, minima = _scales_and_minima(blocks)
    codes = fields(blocks[:, 48:].view(-1, 4, 32), 4)
    codes |= fields(blocks[:, None, 16:48], 1) << 4
    scale_into(values, codes, halves(blocks, 0) * scales)
    subtract_minima(values, halves(blocks, 2) * minima)


def _q6_k(blocks: Tensor, values: Tensor) -> None:
    codes = fields(blocks[:, :128].view(-1, 2, 64), 4).flatten(1)
    codes |= fields(blocks[:, 128:192].view(-1, 2, 32), 2).flatten(1) << 4
    scale_into(values, subtract_offset(codes, 32), halves(blocks, 208) * blocks[:, 192:208].view(torch.int8))


UNPACK: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
