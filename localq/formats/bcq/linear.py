"""The Linear of binary codes: few rows of x by `bcq_gemv`, more by dequantized slabs and cuBLAS.

At load codes and scales are put into tiles (`bcq_tiles`), from which both kernels read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.bcq import tiles as bcq_tiles
from localq.formats.bcq.codec import CHUNK_WEIGHTS, Packed, dequantize
from localq.formats.linear import SlabLinear

if TYPE_CHECKING:
    from localq.formats.bcq.kernel import BcqMatrix


class Linear(SlabLinear):
    """y = W x + b with W in binary codes. x [T, in] of any float dtype -> [T, out] of the same dtype.

    matrix   the tensors as the kernels take them, once they are in tiles; None before
    On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    format = "BCQ"
    row_step = bcq_tiles.ROWS
    matrix: BcqMatrix | None = None
    codes: Tensor
    scales: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.planes, self.zero_point, self.group = packed.planes, packed.zero_point, packed.group
        self.shapes = tuple(packed.codes.shape), tuple(packed.scales.shape)
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec, row by row; copies where they are in tiles."""
        return self._rows(0, self.out_features)

    def _rows(self, first: int, count: int) -> Packed:
        """Rows from `first` on, a multiple of 16."""
        if self.matrix is None:
            return Packed(self.codes, self.scales).rows(first, count)
        codes = bcq_tiles.untile_codes(self.codes.view(-1), self.shapes[0], first, count)
        scales = bcq_tiles.untile_scales(self.scales.view(-1), self.shapes[1], self.planes, first, count)
        return Packed(codes, scales)

    def tile_(self) -> Linear:
        """Put codes and scales into tiles where a kernel may read them: on a GPU."""
        return self.put_into_tiles() if self.scales.is_cuda else self

    def put_into_tiles(self) -> Linear:
        """The same anywhere: in place where rows are a multiple of 16 and columns of 128."""
        if self.matrix is not None:
            return self
        from localq.formats.bcq.kernel import BcqMatrix  # the compiled part: loaded where there is a GPU

        self.codes, self.scales = bcq_tiles.tile_(self.codes, self.scales)
        self.matrix = BcqMatrix(
            self.codes,
            self.scales,
            self.planes,
            self.zero_point,
            self.group,
            self.out_features,
            self.in_features,
        )
        return self

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        from localq.formats.bcq.kernel import bcq_gemv
        from localq.kernels import gemv  # as in `put_into_tiles`

        if self.matrix is None or x.shape[0] > gemv.ROWS or x.dtype == torch.float32:
            return self._by_slabs(x)
        return bcq_gemv(x, [self.matrix], biases=[self.bias])

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """See `SlabLinear`. Where no kernel reads tiles, some rows at a time: they are put back row by row before."""
        device = self.codes.device
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=device)
        if self.matrix is not None and dtype != torch.float32 and self.codes.is_cuda:
            from localq.formats.bcq.kernel import bcq_dequantize  # as in `put_into_tiles`

            return bcq_dequantize(self.matrix, first, out)
        tiles = CHUNK_WEIGHTS.get(device.type, 2**18) // (self.row_step * self.in_features)
        rows = max(1, tiles) * self.row_step
        for start in range(0, count, rows):
            part = out[start : start + rows]
            dequantize(self._rows(first + start, len(part)), dtype, part)
        return out
