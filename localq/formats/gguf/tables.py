"""Lookup tables of the block types, one of each a device. The grids of the IQ types are those of the `gguf` package."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

# E2M1 numbers, doubled: ggml's kvalues_mxfp4.
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# ggml's kvalues_iq4nl.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@functools.cache
def fp4(device: torch.device) -> Tensor:
    """Twice the value of each E2M1 code, i8 [16]. Code 8 is +0."""
    return torch.tensor(_FP4, dtype=torch.int8, device=device)


@functools.cache
def iq4(device: torch.device) -> Tensor:
    """The value of each code of IQ4_NL and IQ4_XS, i8 [16]."""
    return torch.tensor(_IQ4, dtype=torch.int8, device=device)


@functools.cache
def e8m0_halved(device: torch.device) -> Tensor:
    """Half of each E8M0 scale, 2^(code - 128), f32 [256]; codes 0 and 1 are subnormal."""
    return torch.tensor([2.0 ** (code - 128) for code in range(256)], dtype=torch.float32, device=device)


@functools.cache
def ue4m3_halved(device: torch.device) -> Tensor:
    """Half of each UE4M3 scale, f32 [256]: the highest bit has no meaning, and 0x7F is 0."""
    scales = [_ue4m3(code & 0x7F) / 2 for code in range(256)]
    scales[0x7F] = 0.0
    return torch.tensor(scales, dtype=torch.float32, device=device)


def _ue4m3(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9


@functools.cache
def fields(bits: int, device: torch.device) -> Tensor:
    """For each byte its fields of `bits`, lowest first, a byte each, in an i64, i32 or i16 [256] (1, 2 or 4 bits)."""
    values = [[byte >> place & (2**bits - 1) for place in range(0, 8, bits)] for byte in range(256)]
    dtype = {1: torch.int64, 2: torch.int32, 4: torch.int16}[bits]
    return torch.tensor(values, dtype=torch.int8).view(dtype).squeeze(1).to(device)


@functools.cache
def flags(zero: int, one: int, device: torch.device) -> Tensor:
    """For each byte 8 bytes in an i64 [256]: `zero` or `one` (i8) for the value of each bit, lowest first."""
    return _flags(zero, one).to(device)


def _flags(zero: int, one: int) -> Tensor:
    bits = [[one if byte >> bit & 1 else zero for bit in range(8)] for byte in range(256)]
    return torch.tensor(bits, dtype=torch.int8).view(torch.int64).squeeze(1)


@functools.cache
def paired_signs(device: torch.device) -> Tensor:
    """For each index of 7 bits 8 signs +-1 (i8) in an i64 [128], as in IQ2_XXS, IQ2_XS and IQ3_XXS.

    The eighth sign makes the number of negative ones even.
    """
    from gguf.quants import IQ2_XXS

    return _flags(1, -1)[torch.frombuffer(bytearray(IQ2_XXS.ksigns), dtype=torch.uint8).long()].to(device)


@functools.cache
def grid(type: str, device: torch.device) -> Tensor:
    """The grid of the IQ type: 8 values (i8) in each entry of an i64 [entries], or 4 in an i32, by its width.

    Imports `gguf`, and numpy with it, at the first call.
    """
    from gguf import quants

    owner: Any = getattr(quants, type)
    owner.init_grid()
    values = torch.from_numpy(owner.grid).reshape(owner.grid_shape).to(torch.int8)
    return values.view(torch.int64 if values.shape[1] == 8 else torch.int32).squeeze(1).to(device)
