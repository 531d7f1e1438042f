"""The Linear of NF4: which kernel multiplies, by how many rows x has.

Up to `gemv.ROWS` rows, and for 16-bit x up to where `crossover` says, the codes are decoded as they are read;
above that, slabs of rows of W are dequantized and multiplied by cuBLAS (`SlabLinear`). On the CPU it is the reference;
the loader replaces it there by a dequantized nn.Linear.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.linear import SlabLinear
from localq.formats.nf4 import crossover
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.nf4.codec import CODE_MAP, Packed, dequantize
from localq.formats.nf4.kernel import Nf4Operand
from localq.kernels import gemv
from localq.kernels.workspace import workspace_of

TILED_AT_A_TIME = 2**24  # weights, of which the copy takes 8 MiB
_shared_tables: dict[torch.device, list[Tensor]] = {}


def shared_table(table: Tensor) -> Tensor:
    """`table`, or the equal one that an earlier matrix on its device has: matrices of one launch must share theirs."""
    known = _shared_tables.setdefault(table.device, [])
    for other in known:
        if other.shape == table.shape and torch.equal(other, table):
            return other
    known.append(table)
    return table


class Linear(SlabLinear):
    """y = W x + b with W in NF4. x [T, in] of any float dtype -> [T, out] of the same dtype.

    tiled    codes and absmax are in the order that the kernels read (`tile_`); `packed` always has them row by row
    """

    format = "NF4"
    row_step = nf4_tiles.ROWS
    codes: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_map: Tensor | None
    offset: Tensor | None
    code_map: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.dtype = packed.dtype
        self.tiled = False
        for name in ("codes", "absmax", "nested_absmax", "offset"):
            self.register_buffer(name, getattr(packed, name))
        self.register_buffer("nested_map", None if packed.nested_map is None else shared_table(packed.nested_map))
        # On the host as well: the kernels take it by value, and reading it back would wait for the device every call.
        self.host_offset = 0.0 if packed.offset is None else float(packed.offset)
        self.register_buffer("code_map", shared_table(CODE_MAP.to(packed.codes.device)))

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec, row by row; copies where they are tiled."""
        codes, absmax = self.codes, self.absmax
        if self.tiled:
            codes, absmax = nf4_tiles.untile(codes, absmax, self.shape)
        return Packed(codes, absmax, self.nested_absmax, self.nested_map, self.offset, self.shape, self.dtype)

    def operand(self) -> Nf4Operand:
        """The buffers; every layout is read."""
        return Nf4Operand(
            self.codes,
            self.absmax,
            self.nested_absmax,
            self.nested_map,
            self.host_offset,
            self.code_map,
            self.out_features,
            self.in_features,
            self.tiled,
            bias=self.bias,
        )

    def tile_(self) -> Linear:
        """Put codes and absmax into the order that the kernels read: in place, some tiles at a time."""
        if self.tiled:
            return self
        codes = self.codes.view(self.out_features, -1)
        absmax = self.absmax.view(self.out_features, -1)
        rows = max(1, TILED_AT_A_TIME // (nf4_tiles.ROWS * self.in_features)) * nf4_tiles.ROWS
        for first in range(0, self.out_features, rows):
            part = slice(first, first + rows)
            shape = (codes[part].shape[0], self.in_features)
            tiles, scales = nf4_tiles.tile(codes[part], absmax[part], shape)
            codes[part], absmax[part] = tiles, scales
        self.tiled = True
        workspace_of(codes.device)  # allocates it now
        return self

    @property
    def shares_sums(self) -> bool:
        """True once in tiles: blocks take parts of them."""
        return self.tiled

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        rows = x.shape[0]
        if x.dtype == torch.float32 or rows >= _rows_from(x.device, self.out_features * self.in_features):
            return self._by_slabs(x)
        if rows > gemv.ROWS:
            return nf4_kernel.nf4_gemm(x, self.operand())
        return nf4_kernel.nf4_gemv(x, [self.operand()])

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        return self.unpack(first, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Every layout."""
        return nf4_kernel.nf4_dequantize(self.operand(), out.dtype, out, (first, len(out)))


@functools.cache
def _rows_from(device: torch.device, weights: int) -> int:
    """`crossover.rows_from`, once per GPU and size: asking for its name at every product takes microseconds."""
    return crossover.rows_from(torch.cuda.get_device_name(device), weights)
