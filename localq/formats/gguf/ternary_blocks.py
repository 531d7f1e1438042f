"""Block types of three values, -1, 0 and 1, times one f16 scale d: TQ1_0, TQ2_0; 256 values a block.

TQ1_0   48 bytes of 5 digits, 4 bytes of 4 digits, d     value = digit - 1
TQ2_0   64 code bytes, d                                 value = code - 1; byte j of 32: values j, j + 32, ...

A byte of TQ1_0 is a fraction in units of 1/256: digit i is the integer part of 3 * (byte * 3^i mod 256) / 256. The
first 32 bytes hold values 0 to 159, digit i of byte j value 32i + j; the next 16 and the last 4 likewise.

Each function writes the f32 values [n, 256] of blocks u8 [n, bytes].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.formats.gguf.bit_fields import fields, halves, scale_into, subtract_offset


def _tq1_0(blocks: Tensor, values: Tensor) -> None:
    fractions = torch.empty_like(values, dtype=torch.uint8)
    at = 0
    for stored, digits in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)):
        for digit in range(digits):
            torch.mul(stored, 3**digit, out=fractions[:, at : at + stored.shape[1]])  # modulo 256
            at += stored.shape[1]
    codes = fractions.short().mul_(3).bitwise_right_shift_(8).sub_(1)
    scale_into(values, codes, halves(blocks, 52))


def _tq2_0(blocks: Tensor, values: Tensor) -> None:
    codes = fields(blocks[:, :64].view(-1, 2, 32), 2)
    scale_into(values, subtract_offset(codes, 1), halves(blocks, 64))


UNPACK: dict[str, Callable[[Tensor, Tensor], None]] = {"TQ1_0": _tq1_0, "TQ2_0": _tq2_0}
