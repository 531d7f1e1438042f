"""Random GGUF matrices, for benchmarks and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.files.gguf.block_types import WITH_FACTORS, by_name
from localq.formats.gguf.codec import Packed, dequantize_blocks
from localq.formats.samples import Random

NORMAL = "Q4_K"
# Bytes of a block at which its 16-bit numbers begin
NUMBERS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
FP4_SCALES = 4  # bytes of a block of NVFP4, its first


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in blocks of the type `scheme`; "" is Q4_K.

    Codes and integer scales are random bytes. Signs of the numbers that multiply them, and of minimums, are random too,
    so that the mean of the weights is about zero: one that is not adds up along wide matrices. NVFP4 has a factor for
    the matrix.
    """
    (out, columns), kind, random = shape, by_name(scheme or NORMAL), Random(seed, device)
    blocks = random.codes(out * columns // kind.values, kind.bytes)
    if kind.name == WITH_FACTORS:
        _set_fp4_scales(blocks, random)
    count = 1 if kind.name == "IQ1_M" else len(NUMBERS.get(kind.name, ()))
    numbers = [_around_one(len(blocks), random) for _ in range(count)]
    _put(blocks, kind.name, numbers)
    power = dequantize_blocks(blocks[:4096], kind.name).square().mean().sqrt()  # of weights whose numbers are about 1
    gain = 1 / float(power) / columns**0.5
    _put(blocks, kind.name, [each * gain for each in numbers])
    factor = float(torch.tensor(gain, dtype=torch.float32)) if kind.name == WITH_FACTORS else 1.0
    return Packed(blocks.view(out, -1), kind.name, factor=factor)


def _around_one(count: int, random: Random) -> Tensor:
    """f16 [count, 1] of both signs."""
    signs = random.integers(0, 2, count, 1) * 2.0 - 1
    return (random.scales(1.0, count, 1, dtype=torch.float32) * signs).half()


def _put(blocks: Tensor, type: str, numbers: list[Tensor]) -> None:
    """Write the 16-bit numbers of each block."""
    if type == "IQ1_M":  # four bits each in the highest ones of four words of 16
        for byte, nibble in zip((49, 51, 53, 55), (0, 4, 8, 12), strict=True):
            bits = numbers[0].view(torch.int16).squeeze(1) >> nibble & 15
            blocks[:, byte] = (blocks[:, byte] & 15) | (bits << 4).to(torch.uint8)
    for at, each in zip(NUMBERS.get(type, ()), numbers, strict=False):
        blocks[:, at : at + 2] = each.view(torch.uint8)


def _set_fp4_scales(blocks: Tensor, random: Random) -> None:
    """Within half of 1: of all mantissas."""
    scales = random.scales(1.0, len(blocks), FP4_SCALES, dtype=torch.float32, spread=0.5)
    blocks[:, :FP4_SCALES] = scales.to(torch.float8_e4m3fn).view(torch.uint8)
