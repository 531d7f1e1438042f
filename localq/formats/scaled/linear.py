"""The Linear of weights with scales apart from their codes: `scaled_gemv` multiplies few rows of x; for more, slabs are
dequantized for cuBLAS.

At load all tensors are put into the order that the kernels read (`formats.scaled.tiles`), in place.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.linear import SlabLinear
from localq.formats.scaled import kernel as scaled_kernel
from localq.formats.scaled import tiles
from localq.formats.scaled.kernel import ROWS, ScaledOperand
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES


class ScaledParts(NamedTuple):
    """Tensors of some rows of a matrix, as `ScaledOperand` has them, in tiles or row by row."""

    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    factors: Tensor | None


class ScaledLinear(SlabLinear):
    """y = W x + b. x [T, in] of any float dtype -> [T, out] of the same dtype.

    kind     of `scaled.kernel.KINDS`; "" for what no kernel reads
    tiled    the tensors are in the order that the kernels read (`tile_`)

    On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    row_step = ROWS
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    factors: Tensor | None

    def __init__(self, shape: tuple[int, int], kind: str, parts: ScaledParts, bias: Tensor | None, *,
                 divides: bool = False, through: torch.dtype = torch.float32) -> None:  # fmt: skip
        super().__init__(shape, bias)
        self.kind, self.divides, self.through, self.tiled = kind, divides, through, False
        for name, tensor in parts._asdict().items():
            self.register_buffer(name, tensor)

    @abstractmethod
    def defined_rows(self, parts: ScaledParts, first: int, out: Tensor) -> Tensor:
        """The definition: rows of `parts`, which lie row by row, from `first` on into `out` [count, in], and `out`."""
        ...

    def ordered(self, x: Tensor) -> Tensor:
        """x with its columns as the weights have theirs."""
        return x

    @property
    def _held(self) -> ScaledParts:
        return ScaledParts(self.codes, self.scales, self.zeros, self.factors)

    @property
    def row_major(self) -> ScaledParts:
        """All tensors row by row; copies where they are tiled."""
        return self._untiled(0, self.out_features) if self.tiled else self._held

    def operand(self) -> ScaledOperand | None:
        """The buffers; None where they are not tiled."""
        return self._matrix() if self.tiled else None

    def _matrix(self) -> ScaledOperand:
        """The buffers in tiles, columns as they are packed."""
        return ScaledOperand(self.kind, *self._held, divides=self.divides, through=self.through, bias=self.bias)

    def tile_(self) -> ScaledLinear:
        """Put the buffers into the order that the kernels read, in place; matrices of odd sizes stay as they are."""
        if not self.tiled and self.kind and scaled_kernel.fits(self.kind, *self.shape):
            tiles.tile_(self.kind, self.codes, self.scales, self.zeros)
            self.tiled = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            weight = torch.empty(self.shape, dtype=x.dtype, device=x.device)
            return F.linear(self.ordered(x), self.defined_rows(self.row_major, 0, weight), self.bias)
        few = x.shape[0] <= gemv.ROWS and x.dtype in HALF_TYPES
        if not self.tiled or not few or not scaled_kernel.reads(self._matrix()):
            return self._by_slabs(x)
        return scaled_kernel.scaled_gemv(self.ordered(x), [self._matrix()])

    def product_of_rows(self, x: Tensor, first: int, count: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, count], x put into the order of the columns first."""
        return super().product_of_rows(self.ordered(x), first, count, bias)

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`; columns as the weights have them."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        if self.tiled and out.is_cuda:
            return self.unpack(first, out)
        if self.tiled:
            return self.defined_rows(self._untiled(first, count), 0, out)
        return self.defined_rows(self._held, first, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tiles."""
        if not self.tiled:
            raise ValueError(f"unpack: {self.shape} is not in tiles")
        return scaled_kernel.scaled_dequantize(self._matrix(), first, out)

    def _untiled(self, first: int, count: int) -> ScaledParts:
        """Some rows of tiles, whole ones, row by row."""
        rows, factors = slice(first, first + count), self.factors
        if factors is not None and factors.numel() > 1:
            factors = factors[rows]
        of_tiles = (None if each is None else _of_tiles(each, rows, self.out_features)
                    for each in (self.scales, self.zeros))  # fmt: skip
        return ScaledParts(*tiles.untile(self.kind, self.codes[rows], *of_tiles), factors)


def _of_tiles(tensor: Tensor, rows: slice, out: int) -> Tensor:
    """Of whole tiles, which lie behind each other: one run of memory, as [tiles, its values]."""
    per_tile = tensor.numel() // (out // ROWS)
    return tensor.view(-1, per_tile)[rows.start // ROWS : rows.stop // ROWS]
