"""Random GGUF matrices, for benchmarks and tests."""

from __future__ import annotations

import torch

from localq.files.gguf.block_types import by_name
from localq.formats.gguf.codec import Packed, dequantize_blocks
from localq.formats.samples import Random

NORMAL = "Q4_K"
# Bytes of a block at which its 16-bit numbers begin
NUMBERS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in blocks of the type `scheme`; "" is Q4_K.

    Codes and integer scales are random bytes. Signs of the numbers that multiply them, and of minimums, are random too,
    so that the mean of the weights is about zero: one that is not adds up along wide matrices.
    """
    (out, columns), kind, random = shape, by_name(scheme or NORMAL), Random(seed, device)
    blocks = random.codes(out * columns // kind.values, kind.bytes)
    for at in NUMBERS[kind.name]:
        signs = random.integers(0, 2, len(blocks), 1) * 2.0 - 1
        numbers = (random.scales(1.0, len(blocks), 1, dtype=torch.float32) * signs).half()
        blocks[:, at : at + 2] = numbers.view(torch.uint8)
    power = dequantize_blocks(blocks[:4096], kind.name).square().mean().sqrt()  # of weights whose numbers are about 1
    gain = 1 / float(power) / columns**0.5
    for at in NUMBERS[kind.name]:
        numbers = blocks[:, at : at + 2].contiguous().view(torch.float16)
        blocks[:, at : at + 2] = (numbers * gain).view(torch.uint8)
    return Packed(blocks.view(out, -1), kind.name)
