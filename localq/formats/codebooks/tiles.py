"""Additive codebooks in the order that their kernel reads (csrc/lookup/gemv.h): codes in tiles, codewords as fragments.

Codes of 16 rows are turned into [book][position][row], so that a warp's lanes, one position each, read 16 rows in one
load of 512 bytes that lie behind each other. `untile` undoes it bit for bit; the bytes are as many, but for a last tile
that is filled up. Works on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS, ENTRIES = 16, 256  # of a tile; of a codebook as the kernel reads it
STEP, LONGEST = 16, 32  # weights of a codeword in one product of the tensor cores; the most that a codeword has
TILED_AT_A_TIME = 2**23  # codes


def tile(codes: Tensor) -> Tensor:
    """codes of 8 bits [out, positions] or [out, positions, books] -> [ceil(out/16) * books * positions * 16].

    Rows that fill up the last tile have code 0.
    """
    rows = codes.reshape(codes.shape[0], codes.shape[1], -1)
    short = -rows.shape[0] % ROWS
    if short:
        rows = torch.cat((rows, rows.new_zeros(short, *rows.shape[1:])))
    return rows.view(-1, ROWS, *rows.shape[1:]).permute(0, 3, 2, 1).reshape(-1)


def untile(tiles: Tensor, shape: tuple[int, ...], first: int = 0, count: int | None = None) -> Tensor:
    """The inverse of `tile` for codes of `shape`: `count` rows from `first` on, a multiple of 16; all by default."""
    count = shape[0] - first if count is None else count
    books = math.prod(shape[2:])
    held = tiles.view(-1, books, shape[1], ROWS)[first // ROWS : -(-(first + count) // ROWS)]
    return held.permute(0, 3, 2, 1).reshape(-1, *shape[1:])[:count]


def tile_(codes: Tensor) -> Tensor:
    """`tile` in the memory of `codes`, some tiles at a time, and in its shape; a new tensor where a tile is short."""
    if codes.shape[0] % ROWS:
        return tile(codes)
    rows = max(1, TILED_AT_A_TIME // (ROWS * codes[0].numel())) * ROWS
    for first in range(0, codes.shape[0], rows):
        part = codes[first : first + rows]
        part.copy_(tile(part).view_as(part))
    return codes


def factor_of(codebooks: list[Tensor]) -> float:
    """A power of two that no sum of magnitudes of a codeword [entries, length] of `codebooks` exceeds.

    Reads back from the device: for load time.
    """
    largest = max(codebook.float().abs().sum(-1).max().item() for codebook in codebooks)
    return 2.0 ** max(-100, math.ceil(math.log2(largest))) if largest > 0 else 1.0


def fragments(codebook: Tensor, factor: float) -> Tensor:
    """codebook [entries, length] of any float type / `factor` -> f16 [16, steps, 32, 8], steps = ceil(length / 16).

    As operand A of m16n8k16: element [m, k, 4 g + t, 2 r + i] is weight 16 k + 2 t + i + 8 (r // 2) of codeword
    16 m + g + 8 (r % 2), zero where that is behind the length. Fewer than 256 entries, a power of two, are repeated:
    codes count modulo their number. Raises ValueError for longer codewords than the kernel takes.
    """
    entries, length = codebook.shape
    if not 0 < length <= LONGEST or ENTRIES % entries:
        raise ValueError(f"codebooks of {entries} codewords of {length} weights have no fragments")
    steps = -(-length // STEP)
    padded = codebook.new_zeros(ENTRIES, steps * STEP, dtype=torch.float32)
    padded[:, :length] = codebook.float().repeat(ENTRIES // entries, 1) / factor
    split = padded.half().view(16, 2, 8, steps, 2, 4, 2)  # m, upper rows, g, k, upper columns, t, i
    return split.permute(0, 3, 2, 5, 4, 1, 6).reshape(16, steps, 32, 8)
