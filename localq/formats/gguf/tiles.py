"""The tiled order of GGUF blocks: the bytes of a matrix as the kernels read them (csrc/gguf/layout.cuh).

Fields of 1 to 8 bits move within a tile block (16 rows of one block each), so `untile` undoes `tile` bit for bit
and both take as much memory as before. Works on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.files.gguf.block_types import TILE_ROWS, by_name, has_kernel

ROWS = TILE_ROWS
TILED_AT_A_TIME = 2**23  # bytes, of which the temporaries of 1-bit fields take 17 times as many

# Order of the eight fields of a word of nibbles: offset of the column, and whether the row is g + 8.
_NIBBLE_COLUMN = torch.tensor([0, 0, 2, 2, 1, 1, 3, 3])
_NIBBLE_UPPER = torch.tensor([0, 1] * 4)
_DIGIT_COLUMN = torch.tensor([0, 2, 1, 3])  # of the bytes of a word of ternary digits

Field = Callable[[Tensor], Tensor]  # column -> number of its field in a block of a row


@dataclass(frozen=True)
class Section:
    """A part of a tile block.

    width    bits of a field
    source   int64 [fields]: where each field comes from, counted in fields of this width over the 16 blocks
    flip     what the bytes are XORed with: 0x80 makes signed bytes code + 128
    """

    width: int
    source: Tensor
    flip: int = 0


def has_tiles(type: str, shape: tuple[int, int]) -> bool:
    """Return whether a matrix [out, in] of this block type has the tiled order, which the kernels need."""
    return has_kernel(type, shape[0])


def tile(blocks: Tensor, type: str) -> Tensor:
    """u8 [out, row bytes] as in the file -> the same shape, tiled; new memory."""
    return _moved(blocks, type, _tile_blocks)


def untile(tiled: Tensor, type: str) -> Tensor:
    """The inverse of `tile`, for whole tiles: rows of a tiled matrix from a multiple of 16 on."""
    return _moved(tiled, type, _untile_blocks)


def tile_(blocks: Tensor, type: str) -> None:
    """`tile` in the memory of the blocks, some tiles at a time."""
    step = max(1, TILED_AT_A_TIME // (ROWS * blocks.shape[1])) * ROWS
    for first in range(0, len(blocks), step):
        part = blocks[first : first + step]
        part.copy_(tile(part, type))


def _moved(blocks: Tensor, type: str, move: Callable[[Tensor, str], Tensor]) -> Tensor:
    return move(blocks, type).reshape(blocks.shape)


def _tile_blocks(blocks: Tensor, type: str) -> Tensor:
    """u8 [out, row bytes] -> [tiles, blocks of a row, bytes of a tile block]."""
    size = by_name(type).bytes
    rows = blocks.reshape(-1, ROWS, blocks.shape[1] // size, size).transpose(1, 2).reshape(-1, ROWS * size)
    parts = []
    for section in sections(type, str(blocks.device)):
        moved = _joined(_fields(rows, section.width).index_select(1, section.source), section.width)
        parts.append(moved ^ section.flip if section.flip else moved)
    return torch.cat(parts, 1)


def _untile_blocks(tiled: Tensor, type: str) -> Tensor:
    """The inverse of `_tile_blocks`: [out, row bytes]."""
    size = by_name(type).bytes
    blocks = tiled.reshape(-1, ROWS * size)
    rows, first = torch.zeros_like(blocks), 0
    for section in sections(type, str(tiled.device)):
        count = len(section.source) * section.width // 8
        part = blocks[:, first : first + count]
        fields = torch.zeros(len(blocks), ROWS * size * 8 // section.width, dtype=torch.uint8, device=tiled.device)
        fields[:, section.source] = _fields(part ^ section.flip if section.flip else part, section.width)
        rows |= _joined(fields, section.width)
        first += count
    return rows.reshape(-1, tiled.shape[1] // size, ROWS, size).transpose(1, 2)


def _fields(bytes: Tensor, width: int) -> Tensor:
    """u8 [n, bytes] -> u8 [n, fields of `width` bits], lowest first."""
    if width == 8:
        return bytes
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=bytes.device)
    return (bytes[..., None] >> shifts & (1 << width) - 1).flatten(-2)


def _joined(fields: Tensor, width: int) -> Tensor:
    """The inverse of `_fields`."""
    joined = fields[:, :: 8 // width].clone()
    for place in range(1, 8 // width):
        joined |= fields[:, place :: 8 // width] << place * width
    return joined


@functools.cache
def sections(type: str, device: str = "cpu") -> tuple[Section, ...]:
    """The sections of a tile block, in order."""
    size = by_name(type).bytes
    return tuple(
        Section(
            each.width, (each.source[0] * (size * 8 // each.width) + each.source[1]).flatten().to(device), each.flip
        )
        for each in _SECTIONS[type]()
    )


# ---- sections, with (row, field of the row's block) as their source


@dataclass(frozen=True)
class _FieldRun:
    width: int
    source: tuple[Tensor, Tensor]
    flip: int = 0


def _axes(*sizes: int) -> list[Tensor]:
    """The indices of an array of these sizes."""
    return list(torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij"))


def _nibbles(field: Field, columns: int, *, split: bool = False) -> _FieldRun:
    """Words of nibbles of every 32 columns; up to 64 columns of a lane lie together."""
    together = min(columns // 32, 2)
    pair, lane, half, word, place = _axes(columns // 32 // together, 32, together, 2, 8)
    column = 32 * (together * pair + half) + _first(lane, word, split) + _NIBBLE_COLUMN[place]
    return _FieldRun(4, (lane // 4 + 8 * _NIBBLE_UPPER[place], field(column)))


def _nibbles_of_16(field: Field) -> _FieldRun:
    """Words of nibbles of 64 columns; a lane has 16 that follow each other."""
    lane, word, place = _axes(32, 4, 8)
    column = 16 * (lane % 4) + 4 * word + _NIBBLE_COLUMN[place]
    return _FieldRun(4, (lane // 4 + 8 * _NIBBLE_UPPER[place], field(column)))


def _ordered_nibbles(field: Field, columns: int) -> _FieldRun:
    """Words of four columns of row g, then of row g + 8."""
    together = min(columns // 32, 2)
    pair, lane, half, word, upper, place = _axes(columns // 32 // together, 32, together, 2, 2, 4)
    column = 32 * (together * pair + half) + _first(lane, word, split=False) + place
    return _FieldRun(4, (lane // 4 + 8 * upper, field(column)))


def _bytes(field: Field) -> _FieldRun:
    """Bytes of 32 columns: four of row g, four of row g + 8, for each word."""
    lane, word, upper, place = _axes(32, 2, 2, 4)
    return _FieldRun(8, (lane // 4 + 8 * upper, field(_first(lane, word, split=False) + place)), 0x80)


def _pairs(field: Field) -> _FieldRun:
    """Words of 2-bit codes of 32 columns, split."""
    four, lane, word, next_column, half, far, upper = _axes(2, 32, 4, 2, 2, 2, 2)
    column = 32 * (4 * four + word) + _first(lane, half, split=True) + 2 * far + next_column
    return _FieldRun(2, (lane // 4 + 8 * upper, field(column)))


def _fifth_bits(field: Field) -> _FieldRun:
    """Words of 64 columns."""
    lane, word, next_column, half, upper, code, far = _axes(32, 4, 2, 2, 2, 2, 2)
    column = 32 * (2 * word + half) + _first(lane, code, split=False) + 2 * far + next_column
    return _FieldRun(1, (lane // 4 + 8 * upper, field(column)))


def _fifth_bits_of_32(field: Field) -> _FieldRun:
    """Half a word of 32 columns: bits of columns c in its first byte, of c + 1 in its second."""
    lane, next_column, upper, code, far = _axes(32, 2, 2, 2, 2)
    column = _first(lane, code, split=False) + 2 * far + next_column
    return _FieldRun(1, (lane // 4 + 8 * upper, field(column)))


def _sixth_bits(field: Field) -> _FieldRun:
    """Words of two further bits of 32 columns, split."""
    four, lane, word, next_column, half, upper, far = _axes(2, 32, 4, 2, 2, 2, 2)
    column = 32 * (4 * four + word) + _first(lane, half, split=True) + 2 * far + next_column
    return _FieldRun(2, (lane // 4 + 8 * upper, field(column)))


def _third_bits(field: Field) -> _FieldRun:
    """Words of 64 columns, split."""
    lane, word, next_column, half, code, upper, far = _axes(32, 4, 2, 2, 2, 2, 2)
    column = 32 * (2 * word + half) + _first(lane, code, split=True) + 2 * far + next_column
    return _FieldRun(1, (lane // 4 + 8 * upper, field(column)))


def _first(lane: Tensor, word: Tensor, split: bool) -> Tensor:
    """The first column of a lane's word in 32 columns."""
    return 16 * word + 4 * (lane % 4) if split else 8 * (lane % 4) + 4 * word


def _numbers(first: int) -> _FieldRun:
    """A 16-bit number of each row, in pairs of rows g and g + 8."""
    g, upper, byte = _axes(8, 2, 2)
    return _FieldRun(8, (g + 8 * upper, first + byte))


def _headers(first: int, size: int, flip: int = 0) -> _FieldRun:
    """`size` bytes of each row."""
    row, byte = _axes(ROWS, size)
    return _FieldRun(8, (row, first + byte), flip)


def _scales_of_16() -> _FieldRun:
    """A byte for 16 columns of a row, in the order of `_nibbles_of_16`."""
    lane, upper = _axes(32, 2)
    return _FieldRun(8, (lane // 4 + 8 * upper, lane % 4))


def _of_lanes(first: int, step: int) -> _FieldRun:
    """A byte for 8 columns of a row, from `first` on, `step` bytes to the next 32 columns: 16 bytes a lane."""
    lane, run, upper = _axes(32, 8, 2)
    return _FieldRun(8, (lane // 4 + 8 * upper, first + step * run + lane % 4))


def _codes_of_iq2_xs() -> _FieldRun:
    """Two bytes for 8 columns of a row; 16 bytes a lane are those of 128 columns."""
    half, lane, run, upper, byte = _axes(2, 32, 4, 2, 2)
    return _FieldRun(8, (lane // 4 + 8 * upper, 2 + 2 * (4 * (4 * half + run) + lane % 4) + byte))


def _codes_of_iq3() -> _FieldRun:
    """A byte for 4 columns of a row; 16 bytes a lane are those of 128 columns."""
    half, lane, run, upper, code = _axes(2, 32, 4, 2, 2)
    return _FieldRun(8, (lane // 4 + 8 * upper, 2 + 8 * (4 * half + run) + 2 * (lane % 4) + code))


def _words_of_runs(first: int, step: int) -> _FieldRun:
    """A word of 32 bits for 32 columns of a row, `step` bytes to the next, in pairs of rows g and g + 8."""
    run, g, upper, byte = _axes(8, 8, 2, 4)
    return _FieldRun(8, (g + 8 * upper, first + step * run + byte))


def _halves_of_runs(first: int) -> _FieldRun:
    """16 bits for 32 columns of a row, in pairs of rows g and g + 8."""
    run, g, upper, byte = _axes(8, 8, 2, 2)
    return _FieldRun(8, (g + 8 * upper, first + 2 * run + byte))


def _digits(first: int, count: int) -> _FieldRun:
    """`count` bytes of a row, 16 together: words of four, of row g and of row g + 8, for each lane."""
    lane, run, upper, place = _axes(32, count // 16, 2, 4)
    return _FieldRun(8, (lane // 4 + 8 * upper, first + 16 * run + 4 * (lane % 4) + _DIGIT_COLUMN[place]))


def _last_digits(first: int) -> _FieldRun:
    """A word of four bytes of row g and of row g + 8, for all lanes of a row."""
    g, upper, place = _axes(8, 2, 4)
    return _FieldRun(8, (g + 8 * upper, first + _DIGIT_COLUMN[place]))


def _bytes_of_runs(first: int) -> _FieldRun:
    """A byte for 32 columns of a row, in pairs of rows g and g + 8."""
    run, g, upper = _axes(8, 8, 2)
    return _FieldRun(8, (g + 8 * upper, first + run))


def _halves_of(first: int, columns: int) -> Field:
    """Nibbles: the first `columns` columns in the lower ones of a run of bytes, the next in the upper ones."""

    def field(column: Tensor) -> Tensor:
        run, of_run = column // (2 * columns), column % (2 * columns)
        return 2 * (first + columns * run + of_run % columns) + of_run // columns

    return field


def _quarters_of(first: int) -> Field:
    """2-bit fields: four times 32 columns in a run of 32 bytes."""
    return lambda column: 4 * (first + 32 * (column // 128) + column % 32) + column // 32 % 4


def _eighths_of(first: int) -> Field:
    """Bits: eight times 32 columns in a run of 32 bytes."""
    return lambda column: 8 * (first + column % 32) + column // 32


def _bits_of(first: int) -> Field:
    """Bits in order."""
    return lambda column: 8 * first + column


_SECTIONS: dict[str, Callable[[], list[_FieldRun]]] = {
    "Q4_0": lambda: [_nibbles(_halves_of(2, 16), 32), _numbers(0)],
    "Q4_1": lambda: [_nibbles(_halves_of(4, 16), 32), _numbers(0), _numbers(2)],
    "Q5_0": lambda: [_nibbles(_halves_of(6, 16), 32), _fifth_bits_of_32(_bits_of(2)), _numbers(0)],
    "Q5_1": lambda: [_nibbles(_halves_of(8, 16), 32), _fifth_bits_of_32(_bits_of(4)), _numbers(0), _numbers(2)],
    "Q8_0": lambda: [_bytes(lambda column: 2 + column), _numbers(0)],
    "IQ4_NL": lambda: [_ordered_nibbles(_halves_of(2, 16), 32), _numbers(0)],
    "Q2_K": lambda: [_pairs(_quarters_of(16)), _headers(0, 16), _headers(80, 4)],
    "Q3_K": lambda: [_pairs(_quarters_of(32)), _third_bits(_eighths_of(0)), _headers(96, 12), _numbers(108)],
    "Q4_K": lambda: [_nibbles(_halves_of(16, 32), 256), _headers(0, 16)],
    "Q5_K": lambda: [_nibbles(_halves_of(48, 32), 256), _fifth_bits(_eighths_of(16)), _headers(0, 16)],
    "Q6_K": lambda: [
        _nibbles(_halves_of(0, 64), 256, split=True),
        _sixth_bits(_quarters_of(128)),
        _headers(192, 16, 0x80),
        _numbers(208),
    ],
    "IQ4_XS": lambda: [_ordered_nibbles(_halves_of(8, 16), 256), _headers(0, 8)],
    "NVFP4": lambda: [_nibbles_of_16(_halves_of(4, 8)), _scales_of_16()],
    "IQ2_XXS": lambda: [_of_lanes(2, 8), _words_of_runs(6, 8), _numbers(0)],
    "IQ2_XS": lambda: [_codes_of_iq2_xs(), _headers(66, 8), _numbers(0)],
    "IQ2_S": lambda: [_of_lanes(2, 4), _bytes_of_runs(66), _of_lanes(34, 4), _headers(74, 8), _numbers(0)],
    "IQ3_XXS": lambda: [_codes_of_iq3(), _words_of_runs(66, 4), _numbers(0)],
    "IQ3_S": lambda: [_codes_of_iq3(), _bytes_of_runs(66), _of_lanes(74, 4), _headers(106, 4), _numbers(0)],
    "IQ1_S": lambda: [_of_lanes(2, 4), _halves_of_runs(34), _numbers(0)],
    "IQ1_M": lambda: [_of_lanes(0, 4), _halves_of_runs(32), _headers(48, 8)],
    "TQ1_0": lambda: [_digits(0, 32), _digits(32, 16), _last_digits(48), _numbers(52)],
    "TQ2_0": lambda: [_pairs(_quarters_of(0)), _numbers(64)],
}
TILED_TYPES = tuple(_SECTIONS)
