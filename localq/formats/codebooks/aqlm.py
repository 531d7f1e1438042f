"""AQLM: every group of weights of a row is a sum of codewords, one of each codebook, times the scale of the row.

A Linear `P` of a checkpoint, W [out, in], is stored as P.codes, P.codebooks, P.scales and, where it has one, P.bias:

codes      i8 | i16   [out/out_group, in/in_group, books]    one number of a codeword for each codebook; little-endian
codebooks  f16 | bf16 | f32  [books, entries, out_group, in_group]                      entries = 2^bits, 1 to 16 bits
scales     the same type     [out/out_group, 1, 1, 1]
bias       dense, [out]

Codes are stored signed and mean unsigned numbers: -1 in i16 is 65,535. They count modulo `entries`, as the package has
it. A codeword covers out_group rows (1 in all that is published) and in_group columns. With O, G a group of rows and
one of columns, i, j a row and a column inside:

sum    = codebooks[0, codes[O, G, 0], i, j] + codebooks[1, codes[O, G, 1], i, j] + ...     f32, then rounded to the type
W      = sum * scales[O]                                                        one product, rounded to the type

and only then in the wanted dtype: W is the same whatever one computes in. Sizes are those of the tensors; names of
repositories and fields of config.json do not count, and a Linear without codes is a plain one, which is what the list
`linear_weights_not_to_quantize` of config.json says too.

  1x16, groups of 8   2     bits per weight, besides 1 MiB for a codebook and 16 bits for each scale
  2x8,  groups of 8   2     and 8 KiB
  1x16, groups of 16  1     and 2 MiB
  1x8,  groups of 8   1     and 4 KiB
  8x8,  groups of 32  2     and 128 KiB

The definition is `aqlm.utils._dequantize_weight` of the package aqlm 1.1.7, in the type of the stored codebooks; the
dequantize kernels of its CUDA part round in the same two places. (Its kernels for products put the scale behind the
sum over columns, its numba kernel computes in f32.) For f16 and f32, and for one codebook, all bits are equal. bfloat16
sums of several codebooks are rounded to even here, as on CUDA; torch's CPU library rounds ties up, and the package with
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import bad_file
from localq.files import schemes
from localq.files.json_files import DAMAGED
from localq.formats.checkpoint import Checkpoint
from localq.formats.codebooks import gather_kernel, gather_order, unpack_kernel
from localq.formats.codebooks import tiles as codebook_tiles
from localq.formats.codebooks.definition import dequantize_codes
from localq.formats.codebooks.gather_kernel import GatherOperand
from localq.formats.codebooks.linear import LinearCodebook, VqLinear
from localq.formats.samples import Random
from localq.kernels import gemv
from localq.kernels.operand import Operand

quant_method = "aqlm"
BLOCK = 8  # columns of a codeword of most schemes
VARIANTS = ("2x8g8", "1x8g8", "1x16g8", "1x16g16")
suffixes = (".codes", ".codebooks", ".scales")
CODES = {"int8": 256, "int16": 65_536}  # type of codes -> entries that they can tell apart
VALUES = ("float16", "bfloat16", "float32")
HALF_TYPES = (torch.float16, torch.bfloat16)
# Weights that are dequantized together. On a GPU their temporaries stay within `Format.unpack_bytes`.
CHUNK_WEIGHTS = {"cpu": 2**20, "cuda": 2**22}


@dataclass(frozen=True)
class Packed:
    """One matrix: see the module."""

    codes: Tensor
    codebooks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        _, _, out_group, in_group = self.codebooks.shape
        return self.codes.shape[0] * out_group, self.codes.shape[1] * in_group

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return self.codes.nbytes + self.codebooks.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return Packed(self.codes.to(device), self.codebooks.to(device), self.scales.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`, every tensor where `place` copies it."""
        return replace(self, codes=place(self.codes), codebooks=place(self.codebooks), scales=place(self.scales))


def bytes(out: int, columns: int, books: int = 1, bits: int = 16, group: int = 8) -> int:
    """Bytes of a matrix on the device, in groups of one row, with codebooks of 16-bit values."""
    codes = out * (columns // group) * books * (1 if bits <= 8 else 2)
    return codes + 2 * books * (1 << bits) * group + 2 * out


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in `scheme`: "2x8g8"; every code, equally often."""
    (out, columns), random = shape, Random(seed, device)
    books, bits, group = schemes.aqlm_scheme(scheme)
    codes = random.codes(out, columns // group, books, dtype=torch.int16 if bits > 8 else torch.int8)
    codebooks = random.normal(books, 1 << bits, 1, group, deviation=books**-0.5)
    return Packed(codes, codebooks, random.scales(columns**-0.5, out, 1, 1, 1))


def multiplied(packed: Packed) -> Tensor:
    """f32 [out, in]: the weights as products take them, codeword times scale, not rounded to 16 bit."""
    unscaled = dequantize(replace(packed, scales=torch.ones_like(packed.scales)), torch.float32)
    return unscaled.mul_(packed.scales.view(-1, 1).float())


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them."""
    return dict(zip(suffixes, (packed.codes, packed.codebooks, packed.scales), strict=True))


# ---- dequantize


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    return dequantize_rows(packed, 0, torch.empty(packed.shape, dtype=dtype, device=packed.codes.device))


def dequantize_rows(packed: Packed, first: int, out: Tensor) -> Tensor:
    """Rows of the matrix from `first` on into `out` [count, in], and `out`. Both count in whole groups of rows."""
    books, entries, out_group, in_group = packed.codebooks.shape
    groups, length = packed.codes.shape[1], out_group * in_group
    table = packed.codebooks.reshape(books, entries, length).float()
    step = max(1, CHUNK_WEIGHTS.get(out.device.type, 2**20) // (groups * length))
    rows = out.view(-1, out_group, groups, in_group)
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        source = slice(first // out_group + begin, first // out_group + begin + len(part))
        _dequantize_chunk(packed.codes[source], table, packed.scales[source], part)
    return out


def _dequantize_chunk(codes: Tensor, table: Tensor, scales: Tensor, out: Tensor) -> None:
    """codes [n, groups, books], table f32 [books, entries, length], scales [n, 1, 1, 1]
    -> out [n, out_group, groups, in_group], groups of rows.

    A function of its own, so that the temporaries of one chunk are gone when the next begins.
    """
    count, out_group, groups, in_group = out.shape
    length = out_group * in_group
    weight = dequantize_codes(codes, table, length, length, groups * length).to(scales.dtype)
    weight *= scales.view(-1, 1)
    out.copy_(weight.view(count, groups, out_group, in_group).transpose(1, 2))


class Linear(VqLinear):
    """y = W x + b with W in AQLM. x [T, in] of any float dtype -> [T, out] of the same dtype.

    On a GPU `vq_gemv` multiplies up to `gemv.ROWS` rows of x with one or two books of 8-bit codes (`tile_`), and
    `gather_gemv`, for x in the type of the codebooks, with one of 16-bit codes (`operand`); else slabs of rows are
    dequantized and multiplied by cuBLAS. On the CPU it is the reference; the loader replaces it there by a dequantized
    nn.Linear.
    """

    format = "AQLM"
    codes: Tensor
    codebooks: Tensor
    scales: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.row_step = packed.codebooks.shape[2]
        for name in ("codes", "codebooks", "scales"):
            self.register_buffer(name, getattr(packed, name))

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the format."""
        return Packed(self.codes_of("codes"), self.codebooks, self.scales)

    def books(self) -> list[LinearCodebook]:
        """The codebooks that `vq_gemv` reads."""
        books, entries, out_group, in_group = self.codebooks.shape
        small = self.codes.dtype == torch.int8 and books <= 2 and entries <= codebook_tiles.ENTRIES and out_group == 1
        if not small or in_group not in (2, 4, 8, 16) or self.in_features % 8 or self.scales.dtype not in HALF_TYPES:
            return []
        return [LinearCodebook("codes", number, self.codebooks, number) for number in range(books)]

    def tile_(self) -> Linear:
        """Tiles, on a GPU; codewords that are gathered are put into the order of how often codes name them."""
        if gather_kernel.reads(self._gathered):
            gather_order.by_frequency_(self.codes, self.codebooks)
        super().tile_()
        return self

    def operand(self) -> Operand | None:
        """The buffers in tiles, else as `gather_gemv` takes them; None for layouts that neither reads."""
        if self.tiles is not None:
            return replace(self.tiles, bias=self.bias)
        return self._gathered if gather_kernel.reads(self._gathered) else None

    @property
    def _gathered(self) -> GatherOperand:
        return GatherOperand(self.codes, self.codebooks, self.scales, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        operand = self.operand() if x.shape[0] <= gemv.ROWS else None
        if operand is None or not operand.readable(x.dtype):
            return self._by_slabs(x)
        product: Tensor = operand.launch(x, [operand])
        return product

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        books, _, out_group, in_group = self.codebooks.shape
        readable = books <= unpack_kernel.MOST_BOOKS and out_group * in_group <= unpack_kernel.LONGEST
        if out.is_cuda and (readable or self.tiles is not None):
            return self.unpack(first, out)
        if self.tiles is None:
            return dequantize_rows(self.packed, first, out)
        part = self.scales[first : first + count]
        return dequantize_rows(Packed(self.codes_of("codes", first, count), self.codebooks, part), 0, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tiles, or of codes as they are stored."""
        if self.tiles is not None:
            return self.unpack_tiles(self.tiles, first, out, rounded=True)
        books, entries, out_group, in_group = self.codebooks.shape
        codes = unpack_kernel.CodeSet(self.codes, self.codebooks.view(books, entries, out_group * in_group), in_group)
        return unpack_kernel.additive_dequantize([codes], self.scales, first, out, out_group=out_group, rounded=True)


# ---- checkpoints


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in AQLM."""
    return prefix + ".codes" in tensors and tensors[prefix + ".codes"].dtype != "uint8"  # unsigned ones are vq2's


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on the device."""
    return [tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors]


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint: codes, codebooks and scales."""
    return sum(placed_bytes(tensors, prefix))


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by the headers alone; raises LocalqError (exit 8) where they are unsound."""
    _check(checkpoint.tensors, prefix)
    codes, codebooks = (checkpoint.tensors[prefix + suffix].shape for suffix in suffixes[:2])
    return codes[0] * codebooks[2], codes[1] * codebooks[3]


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    _check(checkpoint.tensors, prefix)
    packed = Packed(*(checkpoint.read(prefix + suffix) for suffix in suffixes))
    for what, values in (("codebooks", packed.codebooks), ("scales", packed.scales)):
        _require(prefix, bool(torch.isfinite(values).all()), f"{what} contain NaN or infinity")
    return packed


def _check(tensors: Mapping[str, Any], prefix: str) -> None:
    """Types and shapes, by the headers alone."""
    for suffix in suffixes:
        if prefix + suffix not in tensors:
            raise bad_file(prefix, f"the checkpoint lacks {prefix + suffix}", DAMAGED)
    codes, codebooks, scales = (tensors[prefix + suffix] for suffix in suffixes)
    shapes = [tuple(each.shape) for each in (codes, codebooks, scales)]
    sound = len(shapes[0]) == 3 and len(shapes[1]) == 4 and all(math.prod(shape) > 0 for shape in shapes)
    _require(
        prefix,
        sound,
        f"expected three-dimensional codes and four-dimensional codebooks, not {list(shapes[0])} and {list(shapes[1])}",
    )
    _require(prefix, codes.dtype in CODES, f"codes are {codes.dtype}; expected {' or '.join(CODES)}")
    same = codebooks.dtype == scales.dtype and scales.dtype in VALUES
    _require(
        prefix, same, f"codebooks are {codebooks.dtype} and scales {scales.dtype}; expected one of {', '.join(VALUES)}"
    )
    books, entries = shapes[1][:2]
    _require(prefix, shapes[0][2] == books, f"{shapes[0][2]} codes per group do not match {books} codebooks")
    power = entries & (entries - 1) == 0 and 1 < entries <= CODES[codes.dtype]
    _require(
        prefix, power, f"codebooks have {entries} entries; expected a power of two up to 2^8, or 2^16 for int16 codes"
    )
    _require(prefix, shapes[2] == (shapes[0][0], 1, 1, 1), f"scales have unexpected shape {list(shapes[2])}")


def _require(prefix: str, holds: bool, why: str) -> None:
    if not holds:
        raise bad_file(prefix, f"damaged AQLM weights: {why}", DAMAGED)
