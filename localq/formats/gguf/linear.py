"""The Linear of GGUF blocks: `gguf_gemv` multiplies few rows of x; for more, slabs are dequantized for cuBLAS.

At load blocks are put into the order that the kernels read (`formats.gguf.tiles`), in place. Types without kernels stay
as in the file, and are dequantized by torch for every product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.formats.gguf import kernel as gguf_kernel
from localq.formats.gguf import tiles
from localq.formats.gguf.codec import WORD, Packed, dequantize, dequantize_rows, words_of
from localq.formats.gguf.kernel import GgufOperand
from localq.formats.linear import TiledLinear


class Linear(TiledLinear):
    """y = W x + b with W in GGUF blocks (`formats.gguf.codec`). x [T, in] of any float dtype -> [T, out], the same.

    kind     of the blocks: a type by ggml's name
    factor   multiplies the weights (`Packed`)
    tiled    blocks are in tiles; `packed` has them as in the file

    On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    format = "GGUF"
    row_step = tiles.ROWS
    blocks: Tensor
    places: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.kind, self.format, self.factor = packed.type, f"GGUF {packed.type}", packed.factor
        self.register_buffer("blocks", packed.blocks)
        self.register_buffer("places", packed.places)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec; copies where they are tiled."""
        blocks = tiles.untile(self.blocks, self.kind) if self.tiled else self.blocks
        return Packed(blocks, self.kind, self.places, self.factor)

    def operand(self) -> GgufOperand | None:
        """The buffers; None where they are not tiled."""
        return self._operand if self.tiled else None

    @property
    def _operand(self) -> GgufOperand:
        return GgufOperand(self.blocks, self.kind, self.places, self.factor, bias=self.bias)

    def reorder_(self) -> bool:
        """Put the blocks into tiles, in place; False for types and shapes without tiles."""
        if not tiles.has_tiles(self.kind, self.shape):
            return False
        tiles.tile_(self.blocks, self.kind)
        return True

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype` [out, in], its columns as those of x."""
        return dequantize(self.packed, dtype)

    def dequantized_by_torch(self, first: int, out: Tensor) -> Tensor:
        """Rows of W from `first` on into `out` [count, in], and `out`; columns as they are stored."""
        blocks = self.blocks[first : first + len(out)]
        blocks = tiles.untile(blocks, self.kind) if self.tiled else blocks
        return dequantize_rows(Packed(blocks, self.kind, factor=self.factor), 0, out)

    def unpack_tiles(self, first: int, out: Tensor) -> Tensor:
        """As `unpack`, by `gguf_dequantize`."""
        return gguf_kernel.gguf_dequantize(self._operand, first, out)

    def product_of_few(self, x: Tensor) -> Tensor | None:
        """W x + b by `gguf_gemv`; None where it does not read the shape."""
        return gguf_kernel.gguf_gemv(x, [self._operand]) if gguf_kernel.reads(self._operand) else None

    def in_stored_order(self, x: Tensor) -> Tensor:
        """x with its columns as the weights are stored."""
        if self.places is None:
            return x
        return x.view(len(x), -1, WORD)[:, torch.argsort(words_of(self.places))].flatten(1)
