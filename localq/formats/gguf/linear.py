"""The Linear of GGUF blocks: `gguf_gemv` multiplies few rows of x; for more, slabs are dequantized for cuBLAS.

At load blocks are put into the order that the kernels read (`formats.gguf.tiles`), in place. Types without kernels stay
as in the file, and are dequantized by torch for every product.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.gguf import kernel as gguf_kernel
from localq.formats.gguf import tiles
from localq.formats.gguf.codec import WORD, Packed, dequantize, dequantize_rows, words_of
from localq.formats.gguf.kernel import GgufOperand
from localq.formats.linear import SlabLinear
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES


class Linear(SlabLinear):
    """y = W x + b with W in GGUF blocks (`formats.gguf.codec`). x [T, in] of any float dtype -> [T, out], the same.

    kind     of the blocks: a type by ggml's name
    tiled    blocks are in the order that the kernels read (`tile_`); `packed` has them as in the file

    On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    format = "GGUF"
    row_step = tiles.ROWS
    blocks: Tensor
    places: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.kind, self.tiled, self.format = packed.type, False, f"GGUF {packed.type}"
        self.register_buffer("blocks", packed.blocks)
        self.register_buffer("places", packed.places)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec; copies where they are tiled."""
        return Packed(tiles.untile(self.blocks, self.kind) if self.tiled else self.blocks, self.kind, self.places)

    def operand(self) -> GgufOperand | None:
        """The buffers; None where they are not tiled."""
        return GgufOperand(self.blocks, self.kind, self.places, bias=self.bias) if self.tiled else None

    def tile_(self) -> Linear:
        """Put the blocks into the order that the kernels read, in place; other types and odd sizes stay as they are."""
        if not self.tiled and tiles.has_tiles(self.kind, self.shape):
            tiles.tile_(self.blocks, self.kind)
            self.tiled = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        operand = self.operand()
        few = x.shape[0] <= gemv.ROWS and x.dtype in HALF_TYPES
        if operand is None or not few or not gguf_kernel.reads(operand):
            return self._by_slabs(x)
        return gguf_kernel.gguf_gemv(x, [operand])

    def product_of_rows(self, x: Tensor, first: int, count: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, count], x put into the order of the stored columns first."""
        return super().product_of_rows(self._ordered(x), first, count, bias)

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`; columns lie as they are stored."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.blocks.device)
        if self.tiled and out.is_cuda:
            return self.unpack(first, out)
        blocks = self.blocks[first : first + count]
        return dequantize_rows(Packed(tiles.untile(blocks, self.kind) if self.tiled else blocks, self.kind), 0, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tiles; columns lie as they are stored."""
        operand = self.operand()
        if operand is None:
            raise ValueError(f"unpack: {self.shape} in {self.kind} is not in tiles")
        return gguf_kernel.gguf_dequantize(replace(operand, bias=None), first, out)

    def _ordered(self, x: Tensor) -> Tensor:
        """x with its columns as the weights are stored."""
        if self.places is None:
            return x
        return x.view(len(x), -1, WORD)[:, torch.argsort(words_of(self.places))].flatten(1)
