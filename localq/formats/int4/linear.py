"""The Linear of 4-bit weights: `int4_gemv` multiplies few rows of x; for more, slabs are dequantized for cuBLAS.

At load codes, scales and zero points are put into the order that the kernels read (`formats.int4.tiles`), in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int4 import tiles as int4_tiles
from localq.formats.int4.codec import Packed, columns_of, dequantize, dequantize_rows
from localq.formats.int4.kernel import Int4Operand
from localq.formats.linear import SlabLinear
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES


class Int4Linear(SlabLinear):
    """y = W x + b with W of 4 bits (`formats.int4.codec`). x [T, in] of any float dtype -> [T, out] of the same dtype.

    tiled    codes, scales and zeros are in the order that the kernels read (`tile_`); `packed` has them row by row

    On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    row_step = int4_tiles.ROWS
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.group, self.in_order, self.tiled = packed.group, packed.in_order, False
        for name in ("codes", "scales", "zeros", "order"):
            self.register_buffer(name, getattr(packed, name))

    @property
    def _held(self) -> Packed:
        """The buffers as they lie."""
        return Packed(self.codes, self.scales, self.zeros, self.order, self.group, self.in_order)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec; copies where they are tiled."""
        return int4_tiles.untile(self._held) if self.tiled else self._held

    def operand(self) -> Int4Operand | None:
        """The buffers; None where they are not tiled."""
        if not self.tiled:
            return None
        return Int4Operand(self.codes, self.scales, self.zeros, self._order, self.group, bias=self.bias)

    @property
    def _order(self) -> Tensor | None:
        """`order`, where it changes anything."""
        return None if self.in_order else self.order

    def tile_(self) -> Int4Linear:
        """Put the buffers into the order that the kernels read, in place; matrices of odd sizes stay as they are."""
        if not self.tiled and int4_tiles.tiles(self.shape):
            int4_tiles.tile_(self._held)
            self.tiled = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        operand = self.operand()
        few = x.shape[0] <= gemv.ROWS and x.dtype in HALF_TYPES
        if operand is None or not few or not int4_kernel.reads(replace(operand, order=None)):
            return self._by_slabs(x)
        if x.shape[0] > 1 or not int4_kernel.reads(operand):  # which may be too much for the kernel to gather
            x, operand = self._ordered(x), replace(operand, order=None)
        return int4_kernel.int4_gemv(x, [operand])

    def product_of_rows(self, x: Tensor, first: int, count: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, count], x put into the order of the columns first."""
        return super().product_of_rows(self._ordered(x), first, count, bias)

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`; columns lie as they are packed, in the order of their groups."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        if self.tiled and out.is_cuda:
            return self.unpack(first, out)
        packed = self._held
        if self.tiled:
            packed, first = int4_tiles.untile_rows(packed, first, count), 0
        return dequantize_rows(replace(packed, order=None, in_order=True), first, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tiles; columns lie in the order of their groups."""
        operand = self.operand()
        if operand is None:
            raise ValueError(f"unpack: {self.shape} is not in tiles")
        return int4_kernel.int4_dequantize(operand, first, out)

    def _ordered(self, x: Tensor) -> Tensor:
        """x with its columns as the weights have theirs."""
        return x if self._order is None else x.index_select(1, columns_of(self._order))
