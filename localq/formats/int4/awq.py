"""AWQ in 4 bits, as AutoAWQ's GEMM layout stores it: eight neighbouring OUTPUTS of one column in a word.

A weight matrix [out, in], groups of G columns after each other (config.json's `group_size`: 16 to 1024, or -1 = all of
a row), in a multiple of G; in and out are multiples of 8. A Linear `P` of a checkpoint has

P.qweight  int32 [in, out / 8]        codes
P.qzeros   int32 [in / G, out / 8]    zero points
P.scales   f     [in / G, out]        float16 as a rule; bfloat16 and float32 are read too

Word c of a row of qweight or qzeros holds those of the outputs 8c ... 8c + 7, bits 4i ... 4i + 3 that of the output
8c + [0, 2, 4, 6, 1, 3, 5, 7][i]: lowest nibble first, even outputs before odd ones. Zero points are as they are.

weight[r, k] = (code[k, r] - zero[k // G, r]) * scale[k // G, r], rounded once to the type of the scales

This is AutoAWQ's `dequantize_gemm` (awq/utils/packing_utils.py; the packing is that of awq/modules/linear/gemm.py), bit
for bit; transformers 5 runs the same in GPTQModel. In memory the codes lie along the input, as in `formats.int4.codec`.
4 + 20 / G bits per weight: 4.16 in groups of 128. The layouts `gemv`, `gemv_fast`, `exllama`, `marlin` and `llm-awq`
are refused by name (`stored_format.unreadable`); what is left in 16 bit says so by its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.files import schemes
from localq.formats.checkpoint import Checkpoint
from localq.formats.int4 import read as int4_read
from localq.formats.int4.codec import VARIANTS, Packed, bytes_of, dequantize, multiplied, nibbles, sample
from localq.formats.int4.linear import Int4Linear
from localq.formats.int4.tiles import fits

__all__ = ["BLOCK", "VARIANTS", "Linear", "Packed", "bytes", "dequantize", "fits", "from_checkpoint", "is_quantized",
           "layout", "multiplied", "placed_bytes", "quant_method", "quantization_config", "sample", "stored",
           "stored_bytes", "stored_shape", "suffixes"]  # fmt: skip

quant_method = "awq"
BLOCK = 64  # columns are a multiple of it in what `sample` makes
suffixes = int4_read.SUFFIXES
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # output 8c + j -> its nibble of word c


class Linear(Int4Linear):
    """y = W x + b with W in AWQ."""

    format = "AWQ"


def bytes(out: int, columns: int, group: int = 128) -> int:
    """Bytes of a matrix on the device: codes, 16-bit scales and zero points; group -1 = all columns."""
    groups = 1 if group == -1 else -(-columns // group)
    return out * columns // 2 + 2 * groups * out + groups * out // 2


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in AWQ."""
    return int4_read.is_along_out(tensors, prefix)


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: codes, scales and zero points, as many as stored."""
    return [tensors[prefix + suffix].nbytes for suffix in (".qweight", ".scales", ".qzeros")]


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint: codes, scales and zero points."""
    return sum(placed_bytes(tensors, prefix))


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by config.json and headers; LocalqError (exit 8) where they are unsound."""
    of = _layout(checkpoint, prefix)
    return of.out, of.columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    of = _layout(checkpoint, prefix)
    scales = int4_read.scales(checkpoint, prefix, quant_method)
    words, zeros = checkpoint.read(prefix + ".qweight"), checkpoint.read(prefix + ".qzeros")
    width = int4_read.WORD
    codes = int4_read.repacked(
        of, lambda rows: bytes_of(_in_order(words[:, rows.start // width : rows.stop // width]).T.contiguous())
    )
    return Packed(codes, scales, bytes_of(_in_order(zeros)), None, of.group)


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in]."""
    groups, words = -(-columns // (schemes.int4_group(scheme) or columns)), out // int4_read.WORD
    shapes = ((columns, words), (groups, words), (groups, out))
    return dict(zip(suffixes, zip((torch.int32, torch.int32, torch.float16), shapes, strict=True), strict=True))


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them."""
    words = _in_words(nibbles(packed.codes).T), _in_words(nibbles(packed.zeros))
    return dict(zip(suffixes, (*words, packed.scales), strict=True))


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name. `skipped` are the Linear modules that stay unquantized."""
    group = schemes.int4_group(scheme) or -1
    stated = {"quant_method": quant_method, "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return {**stated, "modules_to_not_convert": skipped or None}


def _layout(checkpoint: Checkpoint, prefix: str) -> int4_read.Layout:
    of = int4_read.layout(checkpoint, prefix, quant_method)
    int4_read.require(
        prefix,
        quant_method,
        of.columns % of.group == 0,
        f"the number of columns ({of.columns}) is not a multiple of the group size ({of.group})",
    )
    return of


def _in_words(values: Tensor) -> Tensor:
    """The inverse of `_in_order`: u8 [n, 8 m] -> int32 [n, m]."""
    order = [PLACES.index(place) for place in range(int4_read.WORD)]
    split = values.reshape(len(values), -1, int4_read.WORD)[:, :, order].flatten(1)
    return bytes_of(split).contiguous().view(torch.int32)


def _in_order(words: Tensor) -> Tensor:
    """int32 [n, m] -> u8 [n, 8 m]: the value of every output."""
    split = nibbles(words.contiguous().view(torch.uint8)).view(len(words), -1, int4_read.WORD)
    return split[:, :, list(PLACES)].flatten(1)
