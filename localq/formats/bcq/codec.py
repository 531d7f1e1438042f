"""The arithmetic of binary codes: what a matrix holds, and its weights. The format is specified in `formats.bcq`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EIGHT = 8  # signs of a code
MOST_PLANES = 5
GROUPS = (32, 64, 128, 256, 512)  # columns that may share a scale; else all of a row do
# Weights that are worked on together. On a GPU their temporaries stay within `Format.unpack_bytes`.
CHUNK_WEIGHTS = {"cpu": 2**18, "cuda": 2**21}


@dataclass(frozen=True)
class Packed:
    """One matrix: codes u8 [out, planes, in/8], scales f16 [out, planes or one more, groups]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape[0], EIGHT * self.codes.shape[2]

    @property
    def planes(self) -> int:
        """Sign vectors that a weight is the sum of."""
        return self.codes.shape[1]

    @property
    def zero_point(self) -> bool:
        """True if there is a zero point for each group."""
        return self.scales.shape[1] > self.codes.shape[1]

    @property
    def group(self) -> int:
        """Columns that share a scale, by how many scales there are."""
        return group_of(self.shape[1], self.scales.shape[2])

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return Packed(self.codes.to(device), self.scales.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`: both tensors where `place` copies them."""
        return Packed(place(self.codes), place(self.scales))

    def rows(self, first: int, count: int) -> Packed:
        """Some rows, as views."""
        return Packed(self.codes[first : first + count], self.scales[first : first + count])

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.codes.nbytes + self.scales.nbytes


def dequantize(packed: Packed, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on the device of `packed`. This is the definition.

    out   where it is written, if given
    """
    rows, columns = packed.shape
    device = packed.codes.device
    weight = torch.empty(rows, columns, dtype=dtype, device=device) if out is None else out
    step = max(1, CHUNK_WEIGHTS.get(device.type, 2**18) // columns)
    for first in range(0, rows, step):
        part = packed.rows(first, step)
        total = torch.zeros(part.shape, device=device)
        for plane in range(packed.planes):
            scale = _spread(part, plane)
            total += torch.where(unpacked(part.codes[:, plane]), scale, -scale)
        if packed.zero_point:
            total += _spread(part, -1)
        weight[first : first + step] = total
    return weight


def _spread(part: Packed, layer: int) -> Tensor:
    """f32 [rows, in]: the scale of each weight."""
    return part.scales[:, layer].float().repeat_interleave(part.group, 1)[:, : part.shape[1]]


def group_of(columns: int, groups: int) -> int:
    """Columns of each of `groups` groups of a row; 0 where no group of the format makes so many."""
    if groups == 1:
        return columns
    return next((group for group in GROUPS if -(-columns // group) == groups), 0)


def unpacked(codes: Tensor) -> Tensor:
    """u8 [..., n] -> bool [..., 8 n]: bit j of byte k is column 8 k + j."""
    lane = torch.arange(EIGHT, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(-1) >> lane & 1).flatten(-2).bool()


def packed_bits(plus: Tensor) -> Tensor:
    """The inverse: bool [..., 8 n] -> u8 [..., n]."""
    weight = (1 << torch.arange(EIGHT, device=plus.device)).to(torch.uint8)
    eights = plus.reshape(*plus.shape[:-1], -1, EIGHT).to(torch.uint8)
    return (eights * weight).sum(-1, dtype=torch.uint8)
