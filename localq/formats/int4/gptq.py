"""GPTQ in 4 bits, as AutoGPTQ and GPTQModel store it: eight neighbouring INPUTS of one output in a word.

A weight matrix [out, in], groups = ceil(in / G) of G columns each (config.json's `group_size`: 16 to 1024, or -1 = all
of a row; the last group may have fewer); in and out are multiples of 8. A Linear `P` of a checkpoint has

P.qweight  int32 [in / 8, out]        bits 4i ... 4i + 3 of word [j, r]: the code of column 8j + i of row r
P.qzeros   int32 [groups, out / 8]    bits 4i ... 4i + 3 of word [g, c]: the zero point of row 8c + i
P.scales   f     [groups, out]        float16 as a rule; bfloat16 and float32 are read too
P.g_idx    int32 [in]                 the group of each column; absent in old files: k // G

weight[r, k] = (code[k, r] - zero[g_idx[k], r]) * scale[g_idx[k], r], rounded once to the type of the scales

With act-order (`desc_act`) g_idx mixes the groups; without it is k // G. It counts in either case, as in GPTQModel,
where every group must have its G columns.

config.json's `checkpoint_format` (or `format`) is "gptq" or "gptq_v2". In the second, zero points are as they are. In
the first ("v1", and where nothing is said) they are stored less 1: 0x11111111 is added to each word of qzeros modulo
2**32. GPTQModel converts whole words in this way when it loads, and the other way when it saves; so a stored 15 carries
into its neighbour, which kernels that add 1 to each nibble (exllama, vLLM) read as 16. Files of symmetric
quantization, 0x77777777 throughout, have none.

This is `dequantize_weight` of GPTQModel's torch path (nn_modules/qlinear/__init__.py), which transformers 5 runs, bit
for bit. In memory columns lie in the order of their groups, with the permutation beside them (`formats.int4.codec`).
4 + 20 / G bits per weight and 16 for each column: 4.16 in groups of 128. Old files have biases of zeros where the model
has none (`idle_biases`). The layouts `marlin`, `bitblas` and others are refused by name (`stored_format.unreadable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.files import schemes
from localq.formats.checkpoint import Checkpoint
from localq.formats.int4 import read as int4_read
from localq.formats.int4.codec import (
    ORDERED,
    Packed,
    as_order,
    bytes_of,
    columns_of,
    dequantize,
    multiplied,
    nibbles,
    sample,
)
from localq.formats.int4.codec import VARIANTS as GROUPS
from localq.formats.int4.linear import Int4Linear
from localq.formats.int4.tiles import fits

__all__ = ["BLOCK", "VARIANTS", "Linear", "Packed", "bytes", "dequantize", "fits", "from_checkpoint", "idle_biases",
           "is_quantized", "layout", "multiplied", "placed_bytes", "quant_method", "quantization_config", "sample",
           "stored", "stored_bytes", "stored_shape", "suffixes"]  # fmt: skip

quant_method = "gptq"
BLOCK = 64  # columns are a multiple of it in what `sample` makes
VARIANTS = (*GROUPS, GROUPS[0] + ORDERED)
suffixes = (*int4_read.SUFFIXES, ".g_idx")
idle_biases = True  # P.bias may be there for a Linear without one, all zeros
ONES = 0x11111111


class Linear(Int4Linear):
    """y = W x + b with W in GPTQ."""

    format = "GPTQ"


def bytes(out: int, columns: int, group: int = 128) -> int:
    """Bytes of a matrix on the device: codes, 16-bit scales, zero points and order; group -1 = all columns."""
    groups = 1 if group == -1 else -(-columns // group)
    return out * columns // 2 + 2 * groups * out + groups * out // 2 + 2 * columns


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Does the checkpoint hold the Linear `prefix` in GPTQ?"""
    return prefix + ".qweight" in tensors and not int4_read.is_along_out(tensors, prefix)


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: codes, scales, zero points; the order in 16 bits."""
    sizes = [tensors[prefix + suffix].nbytes for suffix in (".qweight", ".scales", ".qzeros")]
    return [*sizes, 2 * tensors[prefix + ".g_idx"].shape[0]] if prefix + ".g_idx" in tensors else sizes


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint: codes, scales, zero points and groups."""
    return sum(tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors)


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by config.json and headers; LocalqError (exit 8) where they are unsound."""
    of = int4_read.layout(checkpoint, prefix, quant_method)
    return of.out, of.columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    of = int4_read.layout(checkpoint, prefix, quant_method)
    order = int4_read.grouped_order(checkpoint, prefix, of)
    in_order = order is None or torch.equal(order, torch.arange(of.columns))
    scales = int4_read.scales(checkpoint, prefix, quant_method)
    words, zeros = checkpoint.read(prefix + ".qweight"), checkpoint.read(prefix + ".qzeros")

    def part(rows: slice) -> Tensor:
        codes = words[:, rows].T.contiguous().view(torch.uint8)
        return codes if in_order else bytes_of(nibbles(codes)[:, order])

    if schemes.int4_layout(checkpoint.quantization) != "gptq_v2":
        zeros = (zeros.long() + ONES).to(torch.int32)
    packed_order = None if order is None else as_order(order)
    return Packed(int4_read.repacked(of, part), scales, zeros.view(torch.uint8), packed_order, of.group, in_order)


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in]."""
    groups, width = -(-columns // (schemes.int4_group(scheme.removesuffix(ORDERED)) or columns)), int4_read.WORD
    shapes = ((columns // width, out), (groups, out // width), (groups, out), (columns,))
    dtypes = (torch.int32, torch.int32, torch.float16, torch.int32)
    return dict(zip(suffixes, zip(dtypes, shapes, strict=True), strict=True))


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them as version 1."""
    columns = torch.arange(packed.shape[1], device=packed.codes.device)
    order = columns if packed.order is None else columns_of(packed.order)
    codes, groups = packed.codes, torch.empty_like(columns)
    groups[order] = columns // packed.group
    if not packed.in_order:
        codes = bytes_of(nibbles(codes)[:, torch.argsort(order)])
    words = codes.view(torch.int32).T.contiguous()
    zeros = (packed.zeros.view(torch.int32).long() - ONES).to(torch.int32)
    return dict(zip(suffixes, (words, zeros, packed.scales, groups.to(torch.int32)), strict=True))


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name. `skipped` are the Linear modules that stay unquantized."""
    group = schemes.int4_group(scheme) or -1
    stated = {"quant_method": quant_method, "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    return {**stated, "checkpoint_format": "gptq", "modules_to_not_convert": skipped or None}
