"""The Linear of 4-bit weights: `int4_gemv` multiplies few rows of x; for more, slabs are dequantized for cuBLAS.

At load codes, scales and zero points are put into the order that the kernels read (`formats.int4.tiles`), in place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int4 import tiles as int4_tiles
from localq.formats.int4.codec import Packed, columns_of, dequantize, dequantize_rows
from localq.formats.int4.kernel import Int4Operand
from localq.formats.linear import TiledLinear


class Int4Linear(TiledLinear):
    """y = W x + b with W of 4 bits (`formats.int4.codec`). x [T, in] of any float dtype -> [T, out] of the same dtype.

    tiled    codes, scales and zeros are in tiles; `packed` has them row by row

    On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    row_step = int4_tiles.ROWS
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.group, self.in_order = packed.group, packed.in_order
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
        return self._operand if self.tiled else None

    @property
    def _operand(self) -> Int4Operand:
        order = None if self.in_order else self.order
        return Int4Operand(self.codes, self.scales, self.zeros, order, self.group, bias=self.bias)

    def reorder_(self) -> bool:
        """Put the buffers into tiles, in place; False for matrices of odd sizes."""
        if not int4_tiles.tiles(self.shape):
            return False
        int4_tiles.tile_(self._held)
        return True

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype` [out, in], its columns as those of x."""
        return dequantize(self.packed, dtype)

    def dequantized_by_torch(self, first: int, out: Tensor) -> Tensor:
        """Rows of W from `first` on into `out` [count, in], and `out`; columns in the order of their groups."""
        packed = self._held
        if self.tiled:
            packed, first = int4_tiles.untile_rows(packed, first, len(out)), 0
        return dequantize_rows(replace(packed, order=None, in_order=True), first, out)

    def unpack_tiles(self, first: int, out: Tensor) -> Tensor:
        """As `unpack`, by `int4_dequantize`."""
        return int4_kernel.int4_dequantize(self._operand, first, out)

    def product_of_few(self, x: Tensor) -> Tensor | None:
        """W x + b by `int4_gemv`; None where it does not read the groups."""
        operand = self._operand
        if not int4_kernel.reads(replace(operand, order=None)):
            return None
        if x.shape[0] > 1 or not int4_kernel.reads(operand):  # which may be too much for the kernel to gather
            x, operand = self.in_stored_order(x), replace(operand, order=None)
        return int4_kernel.int4_gemv(x, [operand])

    def in_stored_order(self, x: Tensor) -> Tensor:
        """x with its columns in the order of their groups."""
        return x if self.in_order or self.order is None else x.index_select(1, columns_of(self.order))
