"""Binary codes in the order that their kernels read (csrc/bcq_gemv.h), in place; `untile` undoes it bit for bit.

Codes and scales of 16 rows are turned on their side, [tile][plane][position][row] and [tile][layer][group][row], so
that a warp's lanes, one position each, read 16 rows in one load. A position is eight columns. In whole blocks of 1,024
columns four positions are number 8 i + g where the columns have them as number 4 g + i: then the loads i of the lanes
4 g .. 4 g + 3 are 128 columns behind each other, and share a scale. Works on any device.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from localq.quant import vq_tiles

ROWS, BLOCK = vq_tiles.ROWS, 128  # rows of a tile; positions of a block
TILED_AT_A_TIME = 2**23  # bytes


def order(positions: int, device: torch.device) -> Tensor:
    """Which position of the columns lies where: i64 [positions]."""
    whole = positions // BLOCK * BLOCK
    numbers = torch.arange(positions, device=device)
    blocks = numbers[:whole].view(-1, 8, 4, 4).transpose(1, 2).reshape(-1)
    return torch.cat((blocks, numbers[whole:]))


def tile_codes(codes: Tensor) -> Tensor:
    """codes u8 [out, planes, positions] -> [ceil(out/16) * planes * positions * 16]; rows that fill up have code 0."""
    return _turned(codes[..., order(codes.shape[2], codes.device)])


def tile_scales(scales: Tensor) -> Tensor:
    """scales f16 [out, layers, groups] -> [ceil(out/16) * layers * groups * 16]; rows that fill up have scale 0."""
    return _turned(scales)


def untile_codes(tiles: Tensor, shape: tuple[int, ...], first: int = 0, count: int | None = None) -> Tensor:
    """The inverse of `tile_codes` for codes of `shape`: `count` rows from `first` on, a multiple of 16; all of them by
    default."""
    held = _turned_back(tiles, shape, first, count)
    return held[..., torch.argsort(order(shape[2], tiles.device))]


def untile_scales(tiles: Tensor, shape: tuple[int, ...], first: int = 0, count: int | None = None) -> Tensor:
    """The same for scales."""
    return _turned_back(tiles, shape, first, count)


def tile_(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their own memory and shapes, some tiles at a time; new tensors where a tile is short."""
    if codes.shape[0] % ROWS:
        return tile_codes(codes), tile_scales(scales)
    rows = max(1, TILED_AT_A_TIME // (ROWS * max(codes[0].nbytes, scales[0].nbytes))) * ROWS
    for first in range(0, codes.shape[0], rows):
        for tensor, tile in ((codes, tile_codes), (scales, tile_scales)):
            part = tensor[first : first + rows]
            part.copy_(tile(part).view_as(part))
    return codes, scales


@functools.cache
def sign_fragments(device: torch.device) -> Tensor:
    """The 256 sign vectors over 8 as operand A (`vq_tiles.fragments`): one tensor for all matrices of a device. A sum
    of eight x is at most eight times the largest: an eighth of it is an f16 where that is one."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return vq_tiles.fragments((2 * bits - 1).float(), 8.0).to(device)


def _turned(rows: Tensor) -> Tensor:
    """[out, layers, n] -> [tile][layer][n][row of the tile], flat."""
    short = -rows.shape[0] % ROWS
    if short:
        rows = torch.cat((rows, rows.new_zeros(short, *rows.shape[1:])))
    return rows.view(-1, ROWS, *rows.shape[1:]).permute(0, 2, 3, 1).reshape(-1)


def _turned_back(tiles: Tensor, shape: tuple[int, ...], first: int, count: int | None) -> Tensor:
    count = shape[0] - first if count is None else count
    held = tiles.view(-1, *shape[1:], ROWS)[first // ROWS : -(-(first + count) // ROWS)]
    return held.permute(0, 3, 1, 2).reshape(-1, *shape[1:])[:count]
