"""The arithmetic of MXFP4: quantize and dequantize. The format is specified in `formats.mxfp4`, which others import.

Works on whatever device the tensors are on; rows are worked on in chunks that bound the temporaries.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.formats.samples import Random

BLOCK = 32
BIAS = 127  # of E8M0: a scale byte s stands for 2 ** (s - BIAS)
NOT_A_NUMBER = 255  # the scale byte that stands for none
# Weights that are worked on together.
CHUNK_WEIGHTS = {"cpu": 2**18, "cuda": 2**22}

# E2M1 by its three low bits; the fourth is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)], dtype=torch.float32)
BOUNDS = tuple((low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES))
LARGEST_EXPONENT = 2  # of E2M1: 6 = 1.5 * 2 ** 2


@dataclass(frozen=True)
class Packed:
    """One quantized matrix: codes u8 [out, in/2], scales u8 [out, in/32]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return Packed(self.codes.to(device), self.scales.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`: both tensors where `place` copies them."""
        return Packed(place(self.codes), place(self.scales))

    def rows(self, part: slice) -> Packed:
        """Some rows, as views."""
        return Packed(self.codes[part], self.scales[part])

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.codes.nbytes + self.scales.nbytes


def _row_chunks(shape: tuple[int, int], device: torch.device) -> Iterator[slice]:
    """Slices of rows, each of about `CHUNK_WEIGHTS` of that kind of device."""
    out, columns = shape
    rows = max(1, CHUNK_WEIGHTS.get(device.type, 2**18) // columns)
    return (slice(first, first + rows) for first in range(0, out, rows))


def scales_f32(scales: Tensor) -> Tensor:
    """Scale bytes u8 -> the powers of two, f32 of the same shape. 0 is 2 ** -127, which f32 holds as a subnormal."""
    bits = scales.to(torch.int32) << 23
    return bits.masked_fill_(scales == 0, 1 << 22).view(torch.float32)


def quantize(weight: Tensor) -> Packed:
    """weight f32 | bf16 | f16 [out, in], in % 32 == 0 -> Packed on its device.

    Raises LocalqError for a shape that MXFP4 cannot take and for weights that are not finite.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK or not weight.numel():
        raise bad_file(
            "weight", f"MXFP4 requires a column count divisible by {BLOCK}; this matrix has shape {list(weight.shape)}"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise bad_file("weight", f"MXFP4 supports 16-bit and 32-bit floats, not {weight.dtype}")
    out, columns = weight.shape
    codes = torch.empty(out, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out, columns // BLOCK, dtype=torch.uint8, device=weight.device)
    for part in _row_chunks((out, columns), weight.device):
        _quantize_rows(weight[part].float(), codes[part], scales[part])
    return Packed(codes, scales)


def _quantize_rows(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """weight f32 [rows, in] -> codes u8 [rows, in/2], scales u8 [rows, in/32], written in place."""
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    sizes = blocks.abs()
    largest = sizes.amax(dim=-1)
    if not torch.isfinite(largest).all():
        raise bad_file("weight", "the weights contain NaN or infinity")
    exponent = torch.frexp(largest).exponent - 1  # floor(log2), exactly
    scales.copy_((exponent - LARGEST_EXPONENT + BIAS).clamp_(min=0).masked_fill_(largest == 0, 0))
    inverse = (2 * BIAS - scales.to(torch.int32)) << 23  # 2 ** (127 - s): no s is above 252, so this is a normal number
    sizes *= inverse.view(torch.float32).unsqueeze(-1)
    nearest = torch.zeros(blocks.shape, dtype=torch.uint8, device=weight.device)
    for lower, bound in enumerate(BOUNDS):  # a tie goes to the even code; above 6 all is 6
        nearest += sizes >= bound if lower % 2 else sizes > bound
    nearest |= torch.signbit(blocks).to(torch.uint8) << 3
    nearest = nearest.reshape(weight.shape)
    torch.bitwise_or(nearest[:, 0::2], nearest[:, 1::2] << 4, out=codes)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain: every code, equally often; scales of two neighbouring powers."""
    (out, columns), random = shape, Random(seed, device)
    wanted = 1 / (float(VALUES.square().mean()) * columns)  # mean square of a scale
    exponent = math.floor(math.log2(wanted) / 2)
    larger = (wanted / 4.0**exponent - 1) / 3  # the share of scales that are the larger power
    codes = random.codes(out, columns // 2)
    powers = random.integers(0, 2**15, out, columns // BLOCK, dtype=torch.int16) < larger * 2**15
    return Packed(codes, powers.to(torch.uint8).add_(BIAS + exponent))


def join(shape: tuple[int, int], parts: Iterable[tuple[slice, Packed]]) -> Packed:
    """One matrix [out, in] of parts, each with its rows, on the CPU."""
    out, columns = shape
    codes = torch.empty(out, columns // 2, dtype=torch.uint8)
    scales = torch.empty(out, columns // BLOCK, dtype=torch.uint8)
    for rows, packed in parts:
        codes[rows], scales[rows] = packed.codes, packed.scales
    return Packed(codes, scales)


def joined_bytes(weights: int) -> list[int]:
    """Bytes of each tensor of such a matrix: codes and scales."""
    return [weights // 2, weights // BLOCK]


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Values of the two codes of a byte, f32 [256, 2]: low, high. Kept: a copy to a GPU waits for it."""
    return torch.stack((VALUES.repeat(16), VALUES.repeat_interleave(16)), -1).to(device)


def dequantize(packed: Packed, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on the device of `packed`. This is the definition.

    out   where it is written, if given
    """
    device = packed.codes.device
    rows, columns = packed.shape
    weight = torch.empty(rows, columns, dtype=dtype, device=device) if out is None else out
    pairs = _pairs(device)
    for part in _row_chunks(packed.shape, device):
        codes = packed.codes[part]
        values = pairs.index_select(0, codes.reshape(-1).int()).view(codes.shape[0], -1, BLOCK)
        values *= scales_f32(packed.scales[part]).unsqueeze(-1)
        weight[part] = values.view(-1, columns)
        del values  # before the next are made
    return weight
