"""vq2, the 2-bit format of localq: every byte of a row adds a codeword of a codebook, and codewords overlap.

A weight matrix [out, in], in a multiple of 16. A Linear `P` of a checkpoint has

P.codes       u8  [out, in/stride]  a number of a codeword every `stride` columns; 2, 4, 8 or 16: the shapes decide
E.codebook    f16 [256, length]     length a multiple of the stride, stride <= length <= 32
P.codes_2     u8  [out, in/stride2] optional: a second book, of a stride and a length of its own
E.codebook_2  f16 [256, length2]    with it
P.scales      f16 [out]
P.signs       u8  [in/8]            optional: bit i % 8 of byte i // 8 is set where the sign of column i is -1
P.bias        dense, [out]          where the Linear has one

E is P itself or the nearest module around it that has such a tensor: P.codebook, then, where P is
model.layers.3.self_attn.q_proj, model.layers.3.self_attn.codebook, model.layers.3.codebook, and so on to
model.codebook; codebook_2 by itself in the same way. Matrices that share a codebook name it once. `in` is that of the
Linear by config.json.

decoded[r, j] = scales[r] * sum over books, and over h with 0 <= j - stride*h < length, of
                codebook[codes[r, h], j - stride*h]
W             = decoded                       without signs
W             = decoded * H * diag(signs)     with signs; H: Hadamard blocks of `rotation`, which has its own inverse

The terms are added one by one to an f32 zero: the first book, earlier positions h first, then the second. Then one f32
product with the scale; with signs, the butterflies, the product with 1/sqrt(block) and the signs, all in f32. The
result is rounded once, to the wanted dtype. The order is part of the definition: every device gives the same bits. A
product with x rotates x instead (`hadamard.rotate`, rounded to the dtype of x) and multiplies the decoded matrix.

Bits per weight: 8 / stride of each book, and 16 / in for scales, 1 / out for signs, 4096 * length for each codebook
(16 bits of 256 codewords) over the weights that share it. Schemes, "s" stride "l" length:

  s4l16          2     the one that localq makes for 2 bits
  s4l16+s16l16   2.5
  s4l16+s8l16    3
  s4l16+s4l16    4
  s8l8           1     AQLM's 1x8; its 2x8 is s8l8+s8l8

In config.json's quantization_config, `quant_method` is "localq_vq2". `vq2_codec` has the arithmetic, `vq2_read`
the reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from localq.files import format_facts, schemes
from localq.files.linears import Linears
from localq.files.schemes import codebook_name
from localq.formats.codebooks import lookup_kernel, rotation, rotation_kernel, unpack_kernel
from localq.formats.codebooks.linear import LinearCodebook, VqLinear, multiplies
from localq.formats.codebooks.lookup_kernel import VqOperand
from localq.formats.codebooks.vq2_codec import BLOCK, ENTRIES, Packed, decode_rows, dequantize, sample
from localq.formats.codebooks.vq2_read import BOOKS, SUFFIXES, from_checkpoint, stored_shape

__all__ = [
    "BLOCK",
    "VARIANTS",
    "Linear",
    "Packed",
    "bits_per_weight",
    "bytes",
    "decode_rows",
    "dequantize",
    "from_checkpoint",
    "is_quantized",
    "layout",
    "placed_bytes",
    "quant_method",
    "quantization_config",
    "sample",
    "shared_names",
    "stored_bytes",
    "stored_shape",
    "suffixes",
    "to_tensors",
]

quant_method = "localq_vq2"
VARIANTS = ("s4l16", "s4l16+s4l16", "s8l8+s8l8", "s4l16+s16l32")
suffixes = SUFFIXES


def bytes(out: int, columns: int, scheme: str = "s4l16") -> int:
    """Bytes of a matrix on the device, with signs and codebooks of its own."""
    return format_facts.matrix_bytes(Linears("", out, columns, 1), "vq2", scheme)


def bits_per_weight(matrices: Iterable[Packed]) -> float:
    """Stored bits per weight over all of them: codes, codebooks, scales and signs; a codebook in common counts once."""
    held = list(matrices)
    codebooks = {codebook.data_ptr(): codebook.nbytes for packed in held for _, codebook in packed.books}
    others = sum(packed.nbytes - sum(codebook.nbytes for _, codebook in packed.books) for packed in held)
    return 8 * (sum(codebooks.values()) + others) / sum(packed.shape[0] * packed.shape[1] for packed in held)


# ---- checkpoints


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in vq2. AQLM's tensor of that name is signed."""
    return prefix + ".codes" in tensors and tensors[prefix + ".codes"].dtype == "uint8"


def shared_names(tensors: Mapping[str, Any], prefix: str) -> list[str]:
    """The codebooks that the Linear `prefix` has from modules around it."""
    found = [codebook_name(tensors, prefix, codebook) for codes, codebook in BOOKS if prefix + codes in tensors]
    return [name for name in found if name is not None and name.rpartition(".")[0] != prefix]


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor that the Linear `prefix` owns on a device; those of `shared_names` come once for all."""
    return [tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors]


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the same in a checkpoint."""
    return sum(placed_bytes(tensors, prefix))


def layout(
    out: int, columns: int, scheme: str = "s4l16", *, signs: bool = True, codebooks: bool = True
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors that `to_tensors` makes for a matrix [out, in].

    codebooks   P has its own; where it shares them, they are written for the module around
    """
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for (codes, codebook), (stride, length) in zip(BOOKS, schemes.vq2_codebooks(scheme), strict=False):
        described[codes] = (torch.uint8, (out, columns // stride))
        if codebooks:
            described[codebook] = (torch.float16, (ENTRIES, length))
    described[".scales"] = (torch.float16, (out,))
    return described | ({".signs": (torch.uint8, (columns // 8,))} if signs else {})


def to_tensors(packed: Packed, prefix: str, home: str | None = None) -> dict[str, Tensor]:
    """The checkpoint tensors of the Linear `prefix`, by full name, on the CPU; `from_checkpoint` reads them.

    home   the module around P that the codebooks are written for; None: P itself
    """
    tensors: dict[str, Tensor] = {}
    for (codes_suffix, codebook_suffix), (codes, codebook) in zip(BOOKS, packed.books, strict=False):
        tensors[prefix + codes_suffix] = codes
        tensors[(prefix if home is None else home) + codebook_suffix] = codebook
    tensors[f"{prefix}.scales"] = packed.scales
    if packed.signs is not None:
        tensors[f"{prefix}.signs"] = packed.signs
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name. `skipped` are the Linear modules that stay unquantized."""
    return {"quant_method": quant_method, "compute_dtype": compute_dtype, "modules_to_not_convert": skipped}


# ---- the module


class Linear(VqLinear):
    """y = W x + b with W in vq2. x [T, in] of any float dtype -> [T, out] of the same dtype.

    Where there are signs x is rotated, in f32, and rounded to its dtype. On a GPU `vq_gemv` multiplies few rows of it
    with the decoded matrix (one row it rotates itself, with the same bits), for more slabs of that are dequantized and
    multiplied.
    On a CPU the loader replaces it by a dequantized nn.Linear, the reference.
    """

    format = "vq2"
    codes: Tensor
    codebook: Tensor
    scales: Tensor
    codes_2: Tensor | None
    codebook_2: Tensor | None
    signs: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        second = packed.books[1] if len(packed.books) > 1 else (None, None)
        for names, book in zip(BOOKS, (packed.books[0], second), strict=True):
            for name, tensor in zip(names, book, strict=True):
                self.register_buffer(name[1:], tensor)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("signs", packed.signs)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec."""
        return self._packed_rows(0, self.out_features)

    def _packed_rows(self, first: int, count: int) -> Packed:
        books = tuple((self.codes_of(book.codes, first, count), book.codebook) for book in self.books())
        return Packed(books, self.scales[first : first + count], self.signs, (count, self.in_features))

    def books(self) -> list[LinearCodebook]:
        """The codebooks that `vq_gemv` reads."""
        first = LinearCodebook("codes", 0, self.codebook)
        return [first] if self.codebook_2 is None else [first, LinearCodebook("codes_2", 0, self.codebook_2)]

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        operand = self.operand() if multiplies(self, x) else None
        alone = operand is not None and x.shape[0] == 1  # one row is rotated by its product
        if self.signs is not None and not alone:
            x = self._rotated(x, self.signs)
        if operand is None:
            return self._by_slabs(x)
        return lookup_kernel.vq_gemv(x, [operand if alone else replace(operand, signs=None)])

    def operand(self) -> VqOperand | None:
        """The buffers in tiles, which multiply a rotated x where there are signs; None where they are in none."""
        return None if self.tiles is None else replace(self.tiles, bias=self.bias, signs=self.signs)

    def _rotated(self, x: Tensor, signs: Tensor) -> Tensor:
        if not x.is_cuda or x.dtype == torch.float32:
            return rotation.rotate(x, signs)
        return rotation_kernel.hadamard(x.contiguous(), signs)

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of the decoded matrix in `dtype`, for an x that has been rotated."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        return self.unpack(first, out) if out.is_cuda else decode_rows(self._packed_rows(first, count), 0, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tiles, or of codes as they are stored; the decoded matrix."""
        if self.tiles is not None:
            return self.unpack_tiles(self.tiles, first, out, rounded=False)
        packed = self._packed_rows(first, len(out))
        sets = [
            unpack_kernel.CodeSet(codes.unsqueeze(-1), codebook.unsqueeze(0), stride)
            for (codes, codebook), stride in zip(packed.books, packed.strides, strict=True)
        ]
        return unpack_kernel.additive_dequantize(sets, packed.scales, 0, out, rounded=False)
