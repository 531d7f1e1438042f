"""SqueezeLLM's codes in the order of the product (csrc/rowlut/rowlut.h), in place; `untile` undoes it bit for bit.

The codes of 8 rows lie in steps of 64 bytes of each, [out / 8][step][row of the 8][64 bytes]: what a warp loads at a
time are 512 bytes behind each other. 8 and not 16 rows, because a tile of gate and up takes 8 rows of each. Rows that
are no multiple of 8, or not of 128 columns, stay as they are. Files always have the codes row by row. Works on any
device.
"""

from __future__ import annotations

from torch import Tensor

ROWS, STEP = 8, 64  # rows of a group; bytes of a row in a step
TILED_AT_A_TIME = 2**23  # bytes


def fits(out: int, columns: int) -> bool:
    """Return whether a matrix [out, in] has that order."""
    return out % ROWS == 0 and columns % (2 * STEP) == 0


def tile(codes: Tensor) -> Tensor:
    """codes u8 [out, in / 2] row by row -> the same bytes in tiles, as a new tensor of that shape; see `fits`."""
    return codes.view(-1, ROWS, codes.shape[1] // STEP, STEP).transpose(1, 2).reshape(codes.shape)


def untile(codes: Tensor, first: int = 0, count: int | None = None) -> Tensor:
    """The inverse: `count` rows from `first` on, all by default, row by row."""
    count = codes.shape[0] - first if count is None else count
    begin, end = first // ROWS * ROWS, -(-(first + count) // ROWS) * ROWS
    groups = codes[begin:end].view(-1, codes.shape[1] // STEP, ROWS, STEP).transpose(1, 2)
    return groups.reshape(end - begin, codes.shape[1])[first - begin : first - begin + count]


def tile_(codes: Tensor) -> None:
    """`tile` in the memory of `codes`, some groups at a time."""
    rows = max(1, TILED_AT_A_TIME // (ROWS * codes.shape[1])) * ROWS
    for first in range(0, codes.shape[0], rows):
        part = codes[first : first + rows]
        part.copy_(tile(part))
