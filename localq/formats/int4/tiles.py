"""The tiled order of 4-bit weights: the bytes of a matrix as the kernels read them (csrc/int4/layout.cuh).

Codes, scales and zero points move within 16 rows, so `untile` undoes `tile` bit for bit and both take as much memory as
before. For matrices of whole tiles: see `tiles`. Works on any device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from localq.files import schemes
from localq.formats.int4.codec import ORDERED, Packed, bytes_of, nibbles

ROWS, COLUMNS = 16, 64  # rows of a tile; columns of a block of it
TILED_AT_A_TIME = 2**24  # weights, of which the temporaries take some 24 MiB


def tiles(shape: tuple[int, int]) -> bool:
    """Return whether a matrix [out, in] has the tiled order: whole tiles of whole blocks."""
    return shape[0] % ROWS == 0 and shape[1] % COLUMNS == 0


def fits(out: int, columns: int, scheme: str) -> bool:
    """Return whether the kernels read a matrix [out, in] in groups of `scheme`: whole tiles, of whole groups."""
    return tiles((out, columns)) and columns % (schemes.int4_group(scheme.removesuffix(ORDERED)) or columns) == 0


def tile(packed: Packed) -> Packed:
    """The same weights, tiled; new tensors but for the order of columns."""
    codes, scales, zeros = packed.codes, packed.scales, packed.zeros
    return replace(packed, codes=_tile_codes(codes), scales=_tile_scales(scales), zeros=_tile_zeros(zeros))


def tile_(packed: Packed) -> None:
    """`tile` in the memory of the tensors, the codes some tiles at a time."""
    codes = packed.codes
    rows = max(1, TILED_AT_A_TIME // (ROWS * 2 * codes.shape[1])) * ROWS
    for first in range(0, len(codes), rows):
        part = codes[first : first + rows]
        part.copy_(_tile_codes(part))
    packed.scales.copy_(_tile_scales(packed.scales))
    packed.zeros.copy_(_tile_zeros(packed.zeros))


def untile(tiled: Packed) -> Packed:
    """The inverse of `tile`."""
    return untile_rows(tiled, 0, tiled.codes.shape[0])


def untile_rows(tiled: Packed, first: int, count: int) -> Packed:
    """Rows from `first` on of a tiled matrix, both multiples of 16, as a matrix of their own, not tiled."""
    groups = tiled.scales.shape[0]
    codes = _untile_codes(tiled.codes[first : first + count])
    # Tiles lie behind each other with all their groups, so a slab of them is one run of memory.
    scales = tiled.scales.reshape(-1)[first * groups : (first + count) * groups].view(-1, groups, 8, 2)
    zeros = nibbles(tiled.zeros.reshape(-1)[first * groups // 2 : (first + count) * groups // 2])
    return replace(
        tiled,
        codes=codes,
        scales=scales.permute(1, 0, 3, 2).reshape(groups, count),
        zeros=bytes_of(zeros.view(-1, groups, 8, 2).permute(1, 0, 3, 2).reshape(groups, count)),
    )


def _tile_codes(codes: Tensor) -> Tensor:
    """u8 [out, in/2] -> the same shape. A byte of a word has one column of two rows, g and g + 8."""
    # [tile, half, g, block, upper, t, word, pair]: two neighbouring columns of a row in a byte
    rows = codes.reshape(-1, 2, 8, codes.shape[1] // 32, 2, 4, 2, 2)
    low, high = rows[:, 0], rows[:, 1]
    even = (low & 15) | (high << 4)
    odd = (low >> 4) | (high & 240)
    # [tile, g, block, upper, t, word, column of the pair, pair] -> [tile, block, g, t, upper, word, column, pair]
    return torch.stack((even, odd), -2).permute(0, 2, 1, 4, 3, 5, 6, 7).reshape(codes.shape)


def _untile_codes(codes: Tensor) -> Tensor:
    """The inverse of `_tile_codes`."""
    words = codes.reshape(-1, codes.shape[1] // 32, 8, 4, 2, 2, 2, 2).permute(0, 2, 1, 4, 3, 5, 6, 7)
    even, odd = words[..., 0, :], words[..., 1, :]
    low = (even & 15) | (odd << 4)
    high = (even >> 4) | (odd & 240)
    return torch.stack((low, high), 1).reshape(codes.shape)


def _tile_scales(scales: Tensor) -> Tensor:
    """[groups, out] -> the same shape, [tile, group, g, half]."""
    return scales.view(len(scales), -1, 2, 8).permute(1, 0, 3, 2).reshape(scales.shape)


def _tile_zeros(zeros: Tensor) -> Tensor:
    """u8 [groups, out/2] -> the same shape, [tile, group, g] with the half in the nibble."""
    return bytes_of(_tile_scales(nibbles(zeros))).view_as(zeros)
