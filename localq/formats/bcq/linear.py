"""The Linear of binary codes: few rows of x by `bcq_gemv`, more by dequantized slabs and cuBLAS.

At load codes and scales are put into tiles (`formats.bcq.tiles`), from which both kernels read them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.bcq import tiles as bcq_tiles
from localq.formats.bcq.codec import CHUNK_WEIGHTS, Packed, dequantize
from localq.formats.bcq.kernel import BcqOperand
from localq.formats.linear import SlabLinear
from localq.kernels import gemv


class Linear(SlabLinear):
    """y = W x + b with W in binary codes. x [T, in] of any float dtype -> [T, out] of the same dtype.

    tiled    codes and scales are in tiles (`tile_`); `packed` always has them row by row
    On the CPU it is the reference; the loader replaces it there by a dequantized nn.Linear.
    """

    format = "BCQ"
    row_step = bcq_tiles.ROWS
    tiled = False
    codes: Tensor
    scales: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.planes, self.zero_point, self.group = packed.planes, packed.zero_point, packed.group
        self.shapes = tuple(packed.codes.shape), tuple(packed.scales.shape)
        self._stored_bytes = packed.codes.nbytes + packed.scales.nbytes
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec, row by row; copies where they are in tiles."""
        return self._rows(0, self.out_features)

    def _rows(self, first: int, count: int) -> Packed:
        """Rows from `first` on, a multiple of 16."""
        if not self.tiled:
            return Packed(self.codes, self.scales).rows(first, count)
        codes = bcq_tiles.untile_codes(self.codes.view(-1), self.shapes[0], first, count)
        scales = bcq_tiles.untile_scales(self.scales.view(-1), self.shapes[1], self.planes, first, count)
        return Packed(codes, scales)

    def tile_(self) -> Linear:
        """Put codes and scales into tiles where a kernel may read them: on a GPU."""
        return self.put_into_tiles() if self.scales.is_cuda else self

    def put_into_tiles(self) -> Linear:
        """The same anywhere: in place where rows are a multiple of 16 and columns of 128."""
        if not self.tiled:
            self.codes, self.scales = bcq_tiles.tile_(self.codes, self.scales)
            self.tiled = True
        return self

    @property
    def padding_bytes(self) -> int:
        """Device bytes of padding rows and columns in the tiles; 0 for rows in multiples of 16, columns of 128."""
        return self.codes.nbytes + self.scales.nbytes - self._stored_bytes

    def operand(self) -> BcqOperand | None:
        """The buffers; None where they are not in tiles."""
        if not self.tiled:
            return None
        kind = (self.planes, self.zero_point, self.group)
        return BcqOperand(self.codes, self.scales, *kind, self.out_features, self.in_features, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        operand = self.operand()
        if operand is None or x.shape[0] > gemv.ROWS or x.dtype == torch.float32:
            return self._by_slabs(x)
        return bcq_kernel.bcq_gemv(x, [operand])

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`. Where no kernel reads tiles, some at a time: they are put back row by row first."""
        device = self.codes.device
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=device)
        if self.tiled and dtype != torch.float32 and self.codes.is_cuda:
            return self.unpack(first, out)
        tiles = CHUNK_WEIGHTS.get(device.type, 2**18) // (self.row_step * self.in_features)
        rows = max(1, tiles) * self.row_step
        for start in range(0, count, rows):
            part = out[start : start + rows]
            dequantize(self._rows(first + start, len(part)), dtype, part)
        return out

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tiles, in 16 bit."""
        operand = self.operand()
        if operand is None:
            raise ValueError(f"unpack: {self.shape} is not in tiles")
        return bcq_kernel.bcq_dequantize(operand, first, out)
