"""Matrices of 4 and of 8 bits, each in its own form in memory: what GPTQ and compressed-tensors share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from localq.files import schemes
from localq.files.device_bytes import int8_group
from localq.formats.int4 import codec, eight_bits, tiles
from localq.formats.int4.codec import ORDERED
from localq.formats.int4.eight_bits import Int8Linear
from localq.formats.int4.linear import Int4Linear
from localq.formats.scaled import kernel as scaled_kernel

Matrix = codec.Packed | eight_bits.Packed


def linear_of(format: str) -> Callable[..., Int4Linear | Int8Linear]:
    """The Linear of a format, by its name for people: y = W x + b with W of 4 or 8 bits."""

    def linear(packed: Matrix, bias: Tensor | None = None) -> Int4Linear | Int8Linear:
        """(packed, bias) -> the module."""
        eight = isinstance(packed, eight_bits.Packed)
        made = Int8Linear(packed, bias) if isinstance(packed, eight_bits.Packed) else Int4Linear(packed, bias)
        made.format = f"{format}, 8 bits" if eight else format
        return made

    return linear


def dequantize(packed: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    if isinstance(packed, eight_bits.Packed):
        return eight_bits.dequantize(packed, dtype)
    return codec.dequantize(packed, dtype)


def multiplied(packed: Matrix) -> Tensor:
    """f32 [out, in]: the weights as products take them, without the rounding of the definition to 16 bit."""
    return eight_bits.multiplied(packed) if isinstance(packed, eight_bits.Packed) else codec.multiplied(packed)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Matrix:
    """Random weights [out, in] of about unit gain in groups of `scheme`."""
    if schemes.int4_scheme(scheme.removesuffix(ORDERED))[1] == 8:
        return eight_bits.sample(shape, seed, device, scheme)
    return codec.sample(shape, seed, device, scheme)


def fits(out: int, columns: int, scheme: str) -> bool:
    """Return whether the kernels read a matrix [out, in] in groups of `scheme`: whole tiles, of whole groups."""
    group, bits = schemes.int4_scheme(scheme.removesuffix(ORDERED))
    if bits != 8:
        return tiles.fits(out, columns, scheme)
    size = int8_group(columns, group or columns, not group)
    kind = "int8 rows" if size == columns else f"int8 g{size}"
    return kind in scaled_kernel.KINDS and scaled_kernel.fits(kind, out, columns)
