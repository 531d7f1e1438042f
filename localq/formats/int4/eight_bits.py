"""8-bit integers in groups, of GPTQ and compressed-tensors: their form in memory, arithmetic and Linear.

A matrix [out, in] in groups of `group` columns, groups = ceil(in / group), with an order as in `formats.int4.codec`:

codes   u8  [out, in]
scales  f32 [groups, out]          exact: stored in `stored`, 16 bits or 32
zeros   u8  [groups, out] or None  None: 128 throughout, of one group

weight[r, order[k]] = (code[r, k] - zero[k // group, r]) * scale[k // group, r]

rounded to `stored`, then to the wanted dtype: what GPTQModel and compressed-tensors compute, bit for bit. Kernels have
groups of 32, 64 or 128 columns, or one of all without zero points; `refined` repeats the scales of larger ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.files import schemes
from localq.files.device_bytes import INT8_GROUPS, int8_group
from localq.formats.int4.codec import ORDERED, columns_of
from localq.formats.samples import Random
from localq.formats.scaled.kernel import ScaledOperand
from localq.formats.scaled.linear import ScaledLinear, ScaledParts

MIDDLE = 128  # the zero point of symmetric weights
CHUNK_WEIGHTS = {"cpu": 2**20, "cuda": 2**21}  # that are unpacked together


@dataclass(frozen=True)
class Packed:
    """One matrix: see the module. in_order: `order` changes nothing, and none is as good."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    group: int
    stored: torch.dtype
    in_order: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in (self.codes, self.scales, self.zeros, self.order) if each is not None)

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`, every tensor where `place` copies it."""
        return self._each(place)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Packed:
        codes, scales = change(self.codes), change(self.scales)
        zeros, order = (None if each is None else change(each) for each in (self.zeros, self.order))
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order)


def refined(packed: Packed) -> Packed:
    """The same weights in groups of `int8_group`; without zero points where one group of all needs none."""
    columns = packed.shape[1]
    symmetric = packed.zeros is None
    size = int8_group(columns, packed.group, symmetric)
    scales, zeros = packed.scales.float(), packed.zeros
    if size < packed.group and size < columns:
        times, groups = -(-min(packed.group, columns) // size), columns // size
        scales = scales.repeat_interleave(times, 0)[:groups]
        zeros = None if zeros is None else zeros.repeat_interleave(times, 0)[:groups]
    if zeros is None and len(scales) > 1:
        zeros = torch.full_like(scales, MIDDLE, dtype=torch.uint8)
    zeros = None if zeros is None else zeros.contiguous()
    return replace(packed, scales=scales.contiguous(), zeros=zeros, group=size)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in groups of `scheme`, as `int4.codec.sample`; "row" is symmetric."""
    (out, columns), random = shape, Random(seed, device)
    size, ordered = scheme.removesuffix(ORDERED), scheme.endswith(ORDERED)
    group = schemes.int4_group(size) or columns
    groups = -(-columns // group)
    codes = random.integers(1, 256, out, columns)  # whose mean is 128
    zeros = random.integers(MIDDLE - 2, MIDDLE + 3, groups, out) if group < columns else None
    scales = random.scales((columns * 255**2 / 12) ** -0.5, groups, out)
    order = Random(columns, "cpu").permutation(columns).to(device) if ordered else None
    return refined(Packed(codes, scales, zeros, order, group, scales.dtype, not ordered))


def multiplied(packed: Packed) -> Tensor:
    """f32 [out, in]: the weights as products take them, without the rounding of the definition to 16 bit."""
    return dequantize(replace(packed, stored=torch.float32), torch.float32)


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    made = dequantize_rows(packed, 0, torch.empty(packed.shape, dtype=dtype, device=packed.codes.device))
    if packed.order is None or packed.in_order:
        return made
    return torch.empty_like(made).index_copy_(1, columns_of(packed.order), made)


def dequantize_rows(packed: Packed, first: int, out: Tensor) -> Tensor:
    """Rows of the matrix from `first` on into `out` [count, in], and `out`; columns as they are packed."""
    step = max(CHUNK_WEIGHTS.get(out.device.type, 2**20) // out.shape[1], 1)
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        part.copy_(_chunk(packed, slice(first + begin, first + begin + len(part))))
    return out


def _chunk(packed: Packed, rows: slice) -> Tensor:
    """Some rows in the type of the definition.

    A function of its own, so that the temporaries of one chunk are gone when the next begins.
    """
    columns = packed.shape[1]
    scales = packed.scales[:, rows].float().T.repeat_interleave(packed.group, 1)[:, :columns]
    values = packed.codes[rows].float()
    if packed.zeros is None:
        values -= MIDDLE
    else:
        values -= packed.zeros[:, rows].T.repeat_interleave(packed.group, 1)[:, :columns]
    return values.mul_(scales).to(packed.stored)


class Int8Linear(ScaledLinear):
    """y = W x + b with W of 8 bits. The fused step takes it only where its columns are in order."""

    format = "INT8"
    order: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        columns = packed.shape[1]
        self.group, self.in_order = packed.group, packed.order is None or packed.in_order
        by_row = packed.zeros is None and len(packed.scales) == 1
        kind = "int8 rows" if by_row else f"int8 g{packed.group}" if packed.group in INT8_GROUPS else ""
        kind = kind if columns % packed.group == 0 else ""
        parts = ScaledParts(packed.codes, packed.scales, packed.zeros, None)
        if by_row:
            parts = ScaledParts(packed.codes, None, None, packed.scales.view(-1))
        super().__init__(packed.shape, kind, parts, bias, through=packed.stored)
        self.register_buffer("order", packed.order)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of this module; copies where they are tiled."""
        return self._packed(self.row_major)

    def operand(self) -> ScaledOperand | None:
        """The buffers; None where they are not tiled, and where columns are in another order."""
        return super().operand() if self.in_order else None

    def ordered(self, x: Tensor) -> Tensor:
        """x with its columns as the weights have theirs."""
        return x if self.in_order or self.order is None else x.index_select(1, columns_of(self.order))

    def defined_rows(self, parts: ScaledParts, first: int, out: Tensor) -> Tensor:
        """Called by `ScaledLinear`; columns as they are packed."""
        return dequantize_rows(self._packed(parts), first, out)

    def _packed(self, parts: ScaledParts) -> Packed:
        scales = parts.scales if parts.factors is None else parts.factors.view(1, -1)
        assert scales is not None
        return Packed(parts.codes, scales, parts.zeros, self.order, self.group, self.through, self.in_order)
