"""The arithmetic of GGUF blocks: dequantize, bit for bit `gguf.quants.dequantize` (f32), on the device of the blocks.

A row of a matrix is a sequence of blocks of one type (`files.gguf.block_types`). What a block holds is stated by family
in `legacy_blocks`, `k_blocks`, `i_blocks` and `ternary_blocks`; source: ggml, ggml-common.h and ggml-quants.c. Q8_1 and
Q8_K are types of activations, which files do not contain and `gguf.quants` does not dequantize.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.files.gguf.block_types import BlockType, by_name
from localq.formats.gguf import i_blocks, k_blocks, legacy_blocks, ternary_blocks

# Weights that are unpacked together, with 4 to 10 bytes of temporaries each. On a CPU fewer are slower: a block type
# takes some 20 calls, of 4 microseconds at least.
CHUNK_WEIGHTS = {"cpu": 2**20, "cuda": 2**22}
WORD = 8  # columns that move together, where columns are stored in another order

# By the name of a type: writes the f32 values [n, values] of blocks u8 [n, bytes], both contiguous.
UNPACK: dict[str, Callable[[Tensor, Tensor], None]] = {
    **legacy_blocks.UNPACK,
    **k_blocks.UNPACK,
    **i_blocks.UNPACK,
    **ternary_blocks.UNPACK,
}


@dataclass(frozen=True)
class Packed:
    """One matrix: blocks u8 [out, in / values * bytes] as in the file, of the type `type`, by ggml's name.

    places   int16 [in/8], the bits of a u16, or None: columns 8i to 8i + 7 of the matrix are the stored ones from
             8 places[i] on
    factor   multiplies the weights: of NVFP4, whose files may have one for each matrix beside the blocks

    Raises ValueError for blocks that are not a matrix of whole blocks, and for a type that cannot be dequantized.
    """

    blocks: Tensor
    type: str
    places: Tensor | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        size = _block_type(self.type).bytes
        if self.blocks.dtype != torch.uint8:
            raise ValueError(f"blocks have dtype {self.blocks.dtype}, must be uint8")
        if self.blocks.dim() != 2 or self.blocks.shape[1] % size or not self.blocks.shape[1]:
            shape = tuple(self.blocks.shape)
            raise ValueError(f"blocks have shape {shape}, must be [out, a positive multiple of {size}]")

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        kind = by_name(self.type)
        return self.blocks.shape[0], self.blocks.shape[1] // kind.bytes * kind.values

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks and places."""
        return self.blocks.nbytes + (0 if self.places is None else self.places.nbytes)

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        places = None if self.places is None else self.places.to(device)
        return replace(self, blocks=self.blocks.to(device), places=places)

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`, its tensors where `place` copies them."""
        return replace(self, blocks=place(self.blocks), places=None if self.places is None else place(self.places))


def _block_type(name: str) -> BlockType:
    """Raises ValueError for a type that has no definition here."""
    if name not in UNPACK:
        raise ValueError(f"type {name!r} is not one of {', '.join(UNPACK)}")
    return by_name(name)


def dequantize_blocks(blocks: Tensor, type: str) -> Tensor:
    """blocks u8 [..., bytes] of the type `type` -> f32 [..., values]. This is the definition.

    Raises ValueError for another shape or dtype, and for an unknown type.
    """
    kind = _block_type(type)
    if blocks.dtype != torch.uint8:
        raise ValueError(f"blocks have dtype {blocks.dtype}, must be uint8")
    if not blocks.dim() or blocks.shape[-1] != kind.bytes:
        raise ValueError(f"blocks have shape {tuple(blocks.shape)}, must be [..., {kind.bytes}]")
    values = torch.empty(*blocks.shape[:-1], kind.values, dtype=torch.float32, device=blocks.device)
    UNPACK[type](_aligned(blocks.reshape(-1, kind.bytes)), values.view(-1, kind.values))
    return values


def _aligned(blocks: Tensor) -> Tensor:
    """Contiguous blocks [n, bytes] that can be viewed as 16-bit numbers where their size is even."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.storage_offset() % 2 and blocks.shape[1] % 2 == 0 else blocks


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device; f32 weights rounded once."""
    return dequantize_rows(packed, 0, torch.empty(packed.shape, dtype=dtype, device=packed.blocks.device))


def dequantize_rows(packed: Packed, first: int, out: Tensor) -> Tensor:
    """Rows of the matrix from `first` on into `out` [count, in], and `out`. Raises ValueError by name."""
    rows, columns = packed.shape
    if out.dim() != 2 or out.shape[1] != columns:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be [count, {columns}]")
    if first < 0 or first + len(out) > rows:
        raise ValueError(f"first is {first}: rows {first} .. {first + len(out) - 1} of {rows}")
    step = max(CHUNK_WEIGHTS.get(packed.blocks.device.type, 2**20) // columns, 1)
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        part.copy_(_chunk(packed, first + begin, len(part)))
    return out


def _chunk(packed: Packed, first: int, count: int) -> Tensor:
    """Rows of the matrix, f32 [count, in].

    A function of its own, so that the temporaries of one chunk are gone when the next begins.
    """
    blocks = packed.blocks[first : first + count].reshape(-1, by_name(packed.type).bytes)
    stored = dequantize_blocks(blocks, packed.type)
    if packed.factor != 1:
        stored *= packed.factor
    if packed.places is None:
        return stored.view(count, packed.shape[1])
    return stored.view(count, -1, WORD)[:, words_of(packed.places)].flatten(1)


def words_of(places: Tensor) -> Tensor:
    """int16 that holds the bits of a u16 -> int64."""
    return places.long() & 0xFFFF
