"""The Linear of AWQ and of GPTQ. On a GPU no kernel reads their codes: slabs are dequantized, for each token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.quant.int4_codec import ROWS, Packed, dequantize, dequantize_rows
from localq.quant.slabs import SlabLinear


class Int4Linear(SlabLinear):
    """y = W x + b with W of 4 bits (`int4_codec`). x [T, in] of any float dtype -> [T, out] of the same dtype.

    On a GPU slabs of rows are dequantized and multiplied by cuBLAS, whatever T is; `engine.fused` says that this is
    slow. On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    row_step = ROWS
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
    def packed(self) -> Packed:
        """The buffers in the form of the codec."""
        return Packed(self.codes, self.scales, self.zeros, self.order, self.group, self.in_order)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self._by_slabs(x) if x.is_cuda else F.linear(x, dequantize(self.packed, x.dtype), self.bias)

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """See `SlabLinear`."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        return dequantize_rows(self.packed, first, out)
