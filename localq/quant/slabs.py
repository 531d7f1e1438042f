"""What the Linears of all quantized formats share: a product in slabs, where no kernel reads the codes themselves.

As many rows of W as the scratch holds are dequantized into it and multiplied by cuBLAS, then the next ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SlabLinear(nn.Module, ABC):
    """y = W x + b with W [out_features, in_features] in a quantized format; a format says how rows are dequantized.

    format   its name, for people
    row_step slabs begin at multiples of so many rows
    bias     [out] or None
    scratch  u8, for dequantized slabs of W; shared by all Linears of a model. None: allocated when needed
    """

    format = ""
    row_step = 1
    bias: Tensor | None

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        """shape [out, in]."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.scratch: Tensor | None = None
        self.register_buffer("bias", bias)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.out_features, self.in_features

    def tile_(self) -> SlabLinear:
        """Put the tensors into the order that the kernels of the format read, in place; by itself there is no other."""
        return self

    @abstractmethod
    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows first .. first+count-1 of W in `dtype` [count, in]: written into `out` where it is given."""
        ...

    def _by_slabs(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]: dequantize as many rows of W as the scratch holds, multiply, go on."""
        rows = self.slab_rows(x.dtype)
        if rows >= self.out_features:
            slab = self._slab(self.out_features, x.dtype)
            return F.linear(x, self.dequantized_rows(0, self.out_features, x.dtype, slab), self.bias)
        y = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        for first in range(0, self.out_features, rows):
            count = min(rows, self.out_features - first)
            dense = self.dequantized_rows(first, count, x.dtype, self._slab(count, x.dtype))
            part = y[:, first : first + count]  # cuBLAS writes into it: rows may lie apart
            if self.bias is None:
                torch.mm(x, dense.T, out=part)
            else:
                torch.addmm(self.bias[first : first + count], x, dense.T, out=part)
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
