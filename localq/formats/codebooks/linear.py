"""Base of the Linears whose codes `vq_gemv` looks up: vq2, and AQLM with codebooks of 256 codewords.

At load their codes are put into tiles (`formats.codebooks.tiles`), in place, from which all kernels read them. Few rows
of x are multiplied by `vq_gemv`; for more, slabs of rows are dequantized and multiplied by cuBLAS (`SlabLinear`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from localq.formats.codebooks import dequantize_kernel
from localq.formats.codebooks import tiles as codebook_tiles
from localq.formats.codebooks.lookup_kernel import VqBook, VqOperand
from localq.formats.linear import SlabLinear
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES
from localq.kernels.operand import Operand
from localq.kernels.workspace import workspace_of

# Codebook -> factor -> its fragments: matrices that share a codebook share them too, which saves a launch tables.
_fragments: Any = WeakIdKeyDictionary()


@dataclass(frozen=True)
class LinearCodebook:
    """A book of a Linear: the name of the buffer of its codes [out, positions] or [out, positions, books], its number
    among the books of that buffer, and where its codebook [entries, length] is; `codebook` is an index of it."""

    codes: str
    number: int
    codebook: Tensor
    index: int | None = None

    @property
    def values(self) -> Tensor:
        """[entries, length]"""
        return self.codebook if self.index is None else self.codebook[self.index].flatten(1)


class VqLinear(SlabLinear):
    """A `SlabLinear` with codes in tiles, once `tile_` has found a kernel that reads them.

    tiles   the buffers as `vq_gemv` takes them; None before, and where the layout has no kernel. 8 KB of fragments for
            each codebook are all that it has besides the buffers
    """

    tiles: VqOperand | None = None
    scales: Tensor

    def operand(self) -> Operand | None:
        """The buffers in tiles; None where they are in none."""
        return None if self.tiles is None else replace(self.tiles, bias=self.bias)

    @property
    def shares_sums(self) -> bool:
        """True once a kernel reads the tiles: its blocks take slices of columns."""
        return self.tiles is not None

    @abstractmethod
    def books(self) -> list[LinearCodebook]:
        """Return the codebooks that `vq_gemv` would read; empty if it does not read the layout."""
        ...

    def tile_(self) -> VqLinear:
        """Put the codes into tiles where a kernel may read them: on a GPU."""
        return self.put_into_tiles() if self.scales.is_cuda else self

    def put_into_tiles(self) -> VqLinear:
        """As `tile_`, on any device. In place, but codes are copied where the rows are no multiple of 16."""
        books = self.books()
        if self.tiles is not None or not books:
            return self
        self.code_shapes = {book.codes: tuple(getattr(self, book.codes).shape) for book in books}
        for name in self.code_shapes:
            setattr(self, name, codebook_tiles.tile_(getattr(self, name)))
        factor = codebook_tiles.factor_of([book.values for book in books])
        held = tuple(self._book(book, factor) for book in books)
        self.tiles = VqOperand(held, self.scales.view(-1), factor, self.out_features, self.in_features)
        self.row_step = codebook_tiles.ROWS
        workspace_of(self.scales.device)  # allocates it now
        return self

    def _book(self, book: LinearCodebook, factor: float) -> VqBook:
        positions = self.code_shapes[book.codes][1]
        together = sum(other.codes == book.codes for other in self.books())
        tiles = getattr(self, book.codes)
        fragments = _fragments_of(book, factor)
        return VqBook(tiles, fragments, self.in_features // positions, book.number * positions, together * positions)

    def unpack_tiles(self, tiles: VqOperand, first: int, out: Tensor, *, rounded: bool) -> Tensor:
        """Rows from `first` on, a multiple of 16, into `out` [count, in], and `out`: see `vq_dequantize`."""
        codebooks = [book.values for book in self.books()]
        return dequantize_kernel.vq_dequantize(tiles, codebooks, first, out, rounded=rounded)

    def codes_of(self, name: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows first .. first + count - 1 (all by default) of the buffer `name`, row by row; first a multiple of 16."""
        codes: Tensor = getattr(self, name)
        if self.tiles is None:
            return codes[first : None if count is None else first + count]
        return codebook_tiles.untile(codes, self.code_shapes[name], first, count)


def table_bytes(model: nn.Module) -> int:
    """Device bytes of the fragments of `model`'s matrices, which are not buffers: `MOST_FRAGMENTS` of each."""
    matrices = [module.tiles for module in model.modules() if isinstance(module, VqLinear) and module.tiles]
    shared = {book.fragments.data_ptr(): book.fragments.nbytes for matrix in matrices for book in matrix.books}
    return sum(shared.values())


def _fragments_of(book: LinearCodebook, factor: float) -> Tensor:
    known: dict[tuple[int | None, float], Tensor] = _fragments.setdefault(book.codebook, {})
    if (book.index, factor) not in known:
        known[book.index, factor] = codebook_tiles.fragments(book.values, factor)
    return known[book.index, factor]


def multiplies(linear: VqLinear, x: Tensor) -> bool:
    """Return whether `vq_gemv` multiplies x [T, in]: few rows in 16 bit."""
    few = x.shape[0] <= gemv.ROWS and x.dtype in HALF_TYPES
    return linear.tiles is not None and x.is_cuda and few
