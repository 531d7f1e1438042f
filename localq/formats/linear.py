"""Base of the Linears of all quantized formats: a product in slabs, where no kernel reads the codes themselves.

As many rows of W as the scratch holds are dequantized into it and multiplied by cuBLAS, then the next ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES
from localq.kernels.operand import Operand
from localq.kernels.workspace import workspace_of


class PackedLinear(nn.Module, ABC):
    """y = W x + b with W [out_features, in_features] in a quantized format."""

    out_features: int
    in_features: int

    @abstractmethod
    def operand(self) -> Operand | None:
        """The matrix and its bias as a product of few rows takes them; None where no kernel reads their layout."""
        ...


class SlabLinear(PackedLinear):
    """y = W x + b with W [out_features, in_features] in a quantized format; a format says how rows are dequantized.

    format   its name, for people
    row_step slabs begin at multiples of so many rows
    bias     [out] or None
    slab_weights  the most weights of W that a product needs dequantized
    scratch  u8, for dequantized slabs of W; shared by all Linears of a model. None: allocated when needed
    """

    format = ""
    row_step = 1
    bias: Tensor | None

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        """shape [out, in]."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.slab_weights = self.out_features * self.in_features
        self.scratch: Tensor | None = None
        self.register_buffer("bias", bias)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.out_features, self.in_features

    @property
    def shares_sums(self) -> bool:
        """True if blocks of the product exchange sums in the workspace of their stream."""
        return False

    @property
    def padding_bytes(self) -> int:
        """Device bytes that the tiles have in addition to the stored tensors."""
        return 0

    def tile_(self) -> SlabLinear:
        """Put the tensors into the order that the kernels of the format read, in place; by itself there is no other."""
        return self

    def put_into_tiles(self) -> SlabLinear:
        """The same on any device."""
        return self.tile_()

    @abstractmethod
    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Rows of W from `first` on into `out` [count, in], and `out`, by the kernel of the format.

        `first` is a multiple of `row_step`. Raises ValueError for layouts that it does not read.
        """
        ...

    @abstractmethod
    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows first .. first+count-1 of W in `dtype` [count, in]: written into `out` where it is given."""
        ...

    def _by_slabs(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self.product_of_rows(x, 0, self.out_features, self.bias)

    def product_of_rows(self, x: Tensor, first: int, count: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, count], with rows first .. first + count - 1 of W and a bias [count] for them: dequantize as
        many as the scratch holds, multiply, go on. `first` is a multiple of `row_step`."""
        rows = self.slab_rows(x.dtype)
        if rows >= count:
            slab = self._slab(count, x.dtype)
            return F.linear(x, self.dequantized_rows(first, count, x.dtype, slab), bias)
        y = torch.empty(x.shape[0], count, dtype=x.dtype, device=x.device)
        for start in range(0, count, rows):
            size = min(rows, count - start)
            dense = self.dequantized_rows(first + start, size, x.dtype, self._slab(size, x.dtype))
            part = y[:, start : start + size]  # cuBLAS writes into it: rows may lie apart
            if bias is None:
                torch.mm(x, dense.T, out=part)
            else:
                torch.addmm(bias[start : start + size], x, dense.T, out=part)
        return y

    def slab_rows(self, dtype: torch.dtype) -> int:
        """Rows of W, a multiple of `row_step`, that the scratch holds dequantized; all of them without a scratch."""
        if self.scratch is None:
            return self.out_features
        fit = self.scratch.nbytes // (self.in_features * dtype.itemsize)
        return max(fit // self.row_step, 1) * self.row_step

    def _slab(self, rows: int, dtype: torch.dtype) -> Tensor | None:
        needed = rows * self.in_features * dtype.itemsize
        if self.scratch is None or self.scratch.nbytes < needed:
            return None
        return self.scratch[:needed].view(dtype).view(rows, self.in_features)


class TiledLinear(SlabLinear):
    """A `SlabLinear` whose tensors are put into the order of the kernels in place, and whose columns may be stored in
    another order than those of x.

    tiled    the tensors are in the order that the kernels read (`tile_`); shapes without tiles stay as they are
    """

    tiled = False

    @abstractmethod
    def reorder_(self) -> bool:
        """Put the tensors into tiles, in place; False for a shape without tiles."""
        ...

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype` [out, in], its columns as those of x."""
        ...

    @abstractmethod
    def dequantized_by_torch(self, first: int, out: Tensor) -> Tensor:
        """Rows of W from `first` on into `out` [count, in], and `out`: tiled or not, columns as they are stored."""
        ...

    @abstractmethod
    def unpack_tiles(self, first: int, out: Tensor) -> Tensor:
        """As `unpack`, of tiles; columns as they are stored."""
        ...

    @abstractmethod
    def product_of_few(self, x: Tensor) -> Tensor | None:
        """W x + b of x [up to `gemv.ROWS`, in] in 16 bit, by a kernel that reads the tiles; None where none does."""
        ...

    @abstractmethod
    def in_stored_order(self, x: Tensor) -> Tensor:
        """x with its columns as the weights are stored."""
        ...

    def tile_(self) -> TiledLinear:
        """Put the tensors into the order that the kernels read, in place; shapes without tiles stay as they are."""
        self.tiled = self.tiled or self.reorder_()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, self.dequantized(x.dtype), self.bias)
        few = x.shape[0] <= gemv.ROWS and x.dtype in HALF_TYPES
        y = self.product_of_few(x) if few and self.tiled else None
        return self._by_slabs(x) if y is None else y

    def product_of_rows(self, x: Tensor, first: int, count: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, count], x put into the order of the stored columns first."""
        return super().product_of_rows(self.in_stored_order(x), first, count, bias)

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`; columns lie as they are stored."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=next(self.buffers()).device)
        return self.unpack(first, out) if self.tiled and out.is_cuda else self.dequantized_by_torch(first, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tiles; columns lie as they are stored."""
        if not self.tiled:
            raise ValueError(f"unpack: {self.format} of shape {self.shape} is not in tiles")
        return self.unpack_tiles(first, out)


class SlabStack(nn.Module):
    """Matrices [count, out_features, in_features] in a quantized format: the rows of one `tall` matrix, behind each
    other."""

    def __init__(self, tall: SlabLinear, count: int) -> None:
        """tall [count * out, in], without a bias. It stays row by row, as the kernels for experts read it."""
        super().__init__()
        self.tall, self.count = tall, count
        self.out_features, self.in_features = tall.out_features // count, tall.in_features
        tall.slab_weights = self.out_features * self.in_features

    def dequantize(self, first: int, out: Tensor) -> None:
        """Matrices `first` and on into `out` T [matrices, out, in]."""
        rows = len(out) * self.out_features
        self.tall.dequantized_rows(first * self.out_features, rows, out.dtype, out.view(rows, self.in_features))

    def product(self, x: Tensor, index: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + bias [out] with the matrix W of that index."""
        return self.tall.product_of_rows(x, index * self.out_features, self.out_features, bias)


def workspace_bytes(model: nn.Module) -> int:
    """Device bytes of the workspace in which blocks of products hand each other sums; 0 if no matrix needs it."""
    linears = (module for module in model.modules() if isinstance(module, SlabLinear) and module.shares_sums)
    first = next(linears, None)
    return 0 if first is None else workspace_of(next(first.buffers()).device).nbytes
