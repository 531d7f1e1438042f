"""4-bit weights in memory: codes, a scale and a zero point for each group of columns; and their arithmetic.

`formats.int4.awq`, `gptq` and `compressed` specify files, `eight_bits` has 8 bits. Codes of 2
and 3 bits are held as 4. A matrix [out, in] in groups of `group` columns, groups = ceil(in / group). Column k of the
packed form belongs to group k // group and is column order[k] of the matrix (k itself without an order):

codes   u8 [out, in / 2]        byte j of a row: column 2j in the low nibble, column 2j + 1 in the high one
scales  f  [groups, out]        float16, bfloat16 or float32, as stored
zeros   u8 [groups, out / 2]    zero points, byte j: row 2j in the low nibble, row 2j + 1 in the high one
order   int16 [in] or None      the bits of a u16; not of AWQ

weight[r, order[k]] = (code[r, k] - zero[k // group, r]) * scale[k // group, r]

The difference is an exact integer from -15 to 15; the product is rounded once, to the type of the scales, and then to
the wanted dtype. That is what the plain torch paths of AutoAWQ (`dequantize_gemm` of awq/utils/packing_utils.py) and of
GPTQModel (`dequantize_weight` of nn_modules/qlinear) compute, which stand behind transformers, and what
compressed-tensors computes (`dequantize` of quantization/lifecycle/forward.py), bit for bit. Scales may be negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.files import schemes
from localq.formats.samples import Random

# Weights that are unpacked together. On a GPU their temporaries stay within `Format.unpack_bytes`.
CHUNK_WEIGHTS = {"cpu": 2**20, "cuda": 2**22}
ORDERED = ", ordered"  # behind the scheme of a sample whose columns lie in an order of groups
ROWS = 8  # chunks and slabs begin at multiples of so many rows: their zero points lie in whole words


@dataclass(frozen=True)
class Packed:
    """One matrix: see the module. in_order: `order` changes nothing, and none is as good."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None
    group: int
    in_order: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape[0], 2 * self.codes.shape[1]

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
        codes, scales, zeros = change(self.codes), change(self.scales), change(self.zeros)
        return replace(
            self, codes=codes, scales=scales, zeros=zeros, order=None if self.order is None else change(self.order)
        )


VARIANTS = ("g128", "g64", "g32")
POWER = 17.5 + 2 / 3  # mean square of a code less its zero point in `sample`: 1 to 15, 8 twice as often; 7 to 9


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in groups of `scheme`: "g64", "row"; "" is "g128".

    "g128, ordered" has columns in an order of groups, the same for every matrix of that width.
    """
    (out, columns), random = shape, Random(seed, device)
    size, ordered = scheme.removesuffix(ORDERED), scheme.endswith(ORDERED)
    group = schemes.int4_group(size) or columns
    groups = -(-columns // group)
    codes = random.nibbles(out, columns // 2)
    low, high = (random.integers(7, 10, groups, out // 2) for _ in range(2))
    scales = random.scales((columns * POWER) ** -0.5, groups, out)
    order = Random(columns, "cpu").permutation(columns).to(device) if ordered else None
    return Packed(codes, scales, low | high << 4, order, group, not ordered)


def multiplied(packed: Packed) -> Tensor:
    """f32 [out, in]: the weights as products take them, without the rounding of the definition to 16 bit."""
    return dequantize(replace(packed, scales=packed.scales.float()), torch.float32)


def nibbles(stored: Tensor) -> Tensor:
    """u8 [..., n] -> u8 [..., 2n]: the low nibble of a byte, then the high one."""
    return torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


def bytes_of(values: Tensor) -> Tensor:
    """The reverse of `nibbles`: u8 [..., 2n], each below 16 -> u8 [..., n]."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def columns_of(order: Tensor) -> Tensor:
    """int16 that holds the bits of a u16 -> int64."""
    return order.long() & 0xFFFF


def as_order(columns: Tensor) -> Tensor:
    """The reverse of `columns_of`."""
    return (columns - ((columns >= 2**15) * 2**16)).to(torch.int16)


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    return dequantize_rows(packed, 0, torch.empty(packed.shape, dtype=dtype, device=packed.codes.device))


def dequantize_rows(packed: Packed, first: int, out: Tensor) -> Tensor:
    """Rows of the matrix from `first` (a multiple of `ROWS`) on into `out` [count, in], and `out`."""
    step = max(CHUNK_WEIGHTS.get(out.device.type, 2**20) // out.shape[1] // ROWS, 1) * ROWS
    index = None if packed.order is None or packed.in_order else columns_of(packed.order)
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        weight = _chunk(packed, first + begin, len(part))
        if index is None:
            part.copy_(weight)
        else:
            part.index_copy_(1, index, weight.to(out.dtype))
    return out


def _chunk(packed: Packed, first: int, count: int) -> Tensor:
    """Rows of the packed form in the type of the scales [count, in].

    A function of its own, so that the temporaries of one chunk are gone when the next begins.
    """
    rows = slice(first, first + count)
    zeros = nibbles(packed.zeros[:, first // 2 : (first + count + 1) // 2])[:, :count]
    codes = nibbles(packed.codes[rows]).view(torch.int8)
    codes -= _widened(zeros.view(torch.int8), packed)
    return codes * _widened(packed.scales[:, rows], packed)


def _widened(values: Tensor, packed: Packed) -> Tensor:
    """[groups, count] -> [count, in]: the value of its group for each column."""
    return values.T.repeat_interleave(packed.group, 1)[:, : packed.shape[1]]
