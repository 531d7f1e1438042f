"""Binary codes in the order that their kernels read (csrc/bcq/gemv.h); `untile` undoes it bit for bit.

Codes of 16 rows are [tile][block of 128 columns][plane][row g of 8][word of 32 columns][rows g and g + 8]: what tensor
cores take as an operand, 8 bytes of a lane and 256 of a warp behind each other. Scales are [tile][group][plane][row g]
[rows g and g + 8], and behind those of a tile its zero points, [group][row g][..]. In place where rows are a multiple
of 16 and columns of 128; else rows and columns that fill up have code 0, and rows scale 0. Works on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.formats.codebooks import tiles as codebook_tiles

ROWS, COLUMNS = codebook_tiles.ROWS, 128  # of a tile; of a block
WORD, OF_BLOCK = 4, COLUMNS // 8  # bytes: of a word of signs, of a row's block
TILED_AT_A_TIME = 2**23  # bytes


def code_bytes(out: int, planes: int, columns: int) -> int:
    """Bytes of the codes of a matrix [out, columns] in tiles."""
    return -(-out // ROWS) * ROWS * planes * -(-columns // COLUMNS) * OF_BLOCK


def tile_codes(codes: Tensor) -> Tensor:
    """codes u8 [out, planes, in/8] -> [ceil(out/16) * planes * ceil(in/128) * 256]."""
    out, planes, eights = codes.shape
    if out % ROWS or eights % OF_BLOCK:
        full = codes.new_zeros(out + -out % ROWS, planes, eights + -eights % OF_BLOCK)
        full[:out, :, :eights] = codes
        codes = full
    held = codes.view(-1, 2, 8, planes, codes.shape[2] // OF_BLOCK, COLUMNS // 32, WORD)
    return held.permute(0, 4, 3, 2, 5, 1, 6).reshape(-1)  # tile, block, plane, g, word, half, byte


def untile_codes(tiles: Tensor, shape: tuple[int, ...], first: int = 0, count: int | None = None) -> Tensor:
    """The inverse of `tile_codes` for codes of `shape`: `count` rows from `first` on, a multiple of 16; all of them by
    default."""
    count = shape[0] - first if count is None else count
    blocks = -(-shape[2] // OF_BLOCK)
    held = tiles.view(-1, blocks, shape[1], 8, COLUMNS // 32, 2, WORD)[first // ROWS : -(-(first + count) // ROWS)]
    return held.permute(0, 5, 3, 2, 1, 4, 6).reshape(-1, shape[1], blocks * OF_BLOCK)[:count, :, : shape[2]]


def tile_scales(scales: Tensor, planes: int) -> Tensor:
    """scales f16 [out, layers, groups] -> [ceil(out/16) * layers * groups * 16]: those of planes, then zero points."""
    if scales.shape[0] % ROWS:
        scales = torch.cat((scales, scales.new_zeros(-scales.shape[0] % ROWS, *scales.shape[1:])))
    held = scales.view(-1, 2, 8, *scales.shape[1:]).permute(0, 4, 3, 2, 1)  # tile, group, layer, g, half
    return torch.cat((held[:, :, :planes].flatten(1), held[:, :, planes:].flatten(1)), 1).reshape(-1)


def untile_scales(
    tiles: Tensor, shape: tuple[int, ...], planes: int, first: int = 0, count: int | None = None
) -> Tensor:
    """The inverse of `tile_scales`, likewise."""
    count = shape[0] - first if count is None else count
    groups, of_planes = shape[2], shape[2] * planes * ROWS
    held = tiles.view(-1, shape[1] * groups * ROWS)[first // ROWS : -(-(first + count) // ROWS)]
    parts = [part.reshape(len(held), groups, -1, 8, 2) for part in (held[:, :of_planes], held[:, of_planes:])]
    return torch.cat(parts, 2).permute(0, 4, 3, 2, 1).reshape(-1, *shape[1:])[:count]


def tile_(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their own memory and shapes, some tiles at a time; new flat tensors where a tile or a block is short."""
    planes = codes.shape[1]
    if codes.shape[0] % ROWS or codes.shape[2] % OF_BLOCK:
        return tile_codes(codes), tile_scales(scales, planes)
    rows = max(1, TILED_AT_A_TIME // (ROWS * max(codes[0].nbytes, scales[0].nbytes))) * ROWS
    for first in range(0, codes.shape[0], rows):
        part = codes[first : first + rows]
        part.copy_(tile_codes(part).view_as(part))
        part = scales[first : first + rows]
        part.copy_(tile_scales(part, planes).view_as(part))
    return codes, scales
