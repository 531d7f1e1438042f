"""GPTQ in 2, 3, 4 and 8 bits, as AutoGPTQ and GPTQModel store it: neighbouring INPUTS of one output in a word.

A weight matrix [out, in], groups = ceil(in / G) of G columns each (config.json's `group_size`: 16 to 1024, or -1 = all
of a row; the last group may have fewer). With b bits, in and out are multiples of 32 / b, in 3 bits of 32. Row r of a
matrix is a run of bits, b for each column, the lowest of a word first. A Linear `P` of a checkpoint has

P.qweight  int32 [in b / 32, out]        column r: the words of row r
P.qzeros   int32 [groups, out b / 32]    row g: the zero points of all rows, in the same way
P.scales   f     [groups, out]           float16 as a rule; bfloat16 and float32 are read too
P.g_idx    int32 [in]                    the group of each column; absent in old files: k // G

weight[r, k] = (code[k, r] - zero[g_idx[k], r]) * scale[g_idx[k], r], rounded once to the type of the scales

The widths of qzeros and qweight say b; layers may differ (`dynamic`, AutoRound's `extra_config`). With act-order
(`desc_act`) g_idx mixes the groups; without it is k // G. It counts in either case, as in GPTQModel, where every group
must have its G columns.

config.json's `checkpoint_format` (or `format`) is "gptq" or "gptq_v2". In the second, zero points are as they are. In
the first ("v1", and where nothing is said) they are stored less 1: a one in the lowest bit of every code is added to
each word of qzeros modulo 2**32 (0x11111111 in 4 bits). GPTQModel converts whole words in this way when it loads, and
the other way when it saves; so a stored 15 carries into its neighbour, which kernels that add 1 to each nibble
(exllama, vLLM) read as 16. Files of symmetric quantization, 0x77777777 throughout, have none. In 3 bits, where codes
straddle words, 1 is added to each code, as in AutoGPTQ and vLLM; GPTQModel subtracts other constants when it saves
(`OF_GPTQMODEL`), so files that name it in `meta.quantizer` get those.

This is `dequantize_weight` of GPTQModel's torch path (nn_modules/qlinear/__init__.py), which transformers 5 runs, bit
for bit. In memory columns lie in the order of their groups, with the permutation beside them: 4 bits as in
`formats.int4.codec`, which 2 and 3 bits become too, at the memory of 4; 8 bits as in `formats.int4.eight_bits`. On a
device 4 + 20 / G bits per weight and 16 for each column (4.16 in groups of 128), of 8 bits 8 + 40 / G. Old files have
biases of zeros where the model has none (`idle_biases`). The layouts `marlin`, `bitblas` and others are refused by name
(`stored_format.unreadable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.files import device_bytes, schemes
from localq.formats.checkpoint import Checkpoint
from localq.formats.int4 import eight_bits, widths
from localq.formats.int4 import read as int4_read
from localq.formats.int4.codec import (
    ORDERED,
    Packed,
    as_order,
    bytes_of,
    columns_of,
    nibbles,
)
from localq.formats.int4.codec import VARIANTS as GROUPS
from localq.formats.int4.widths import dequantize, fits, multiplied, sample

__all__ = ["BLOCK", "VARIANTS", "Linear", "Packed", "bytes", "dequantize", "fits", "from_checkpoint", "idle_biases",
           "is_quantized", "layout", "multiplied", "placed_bytes", "quant_method", "quantization_config", "sample",
           "stored", "stored_bytes", "stored_shape", "suffixes"]  # fmt: skip

quant_method = "gptq"
BLOCK = 64  # columns are a multiple of it in what `sample` makes
VARIANTS = (*GROUPS, GROUPS[0] + ORDERED, "g128, 8 bits", "g32, 8 bits", "row, 8 bits")
suffixes = (*int4_read.SUFFIXES, ".g_idx")
idle_biases = True  # P.bias may be there for a Linear without one, all zeros
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # by bits: a one in every code of a word
Linear = widths.linear_of("GPTQ")
OF_GPTQMODEL = (0x24924924, 0x92492492, 0x49249249)  # added to words of 3 bits, in turns


def bytes(out: int, columns: int, group: int = 128) -> int:
    """Bytes of a matrix on the device: codes, 16-bit scales, zero points and order; group -1 = all columns."""
    groups = 1 if group == -1 else -(-columns // group)
    return out * columns // 2 + 2 * groups * out + groups * out // 2 + 2 * columns


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in GPTQ."""
    return prefix + ".qweight" in tensors and not int4_read.is_along_out(tensors, prefix)


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: codes, scales, zero points; the order in 16 bits."""
    codes, scales, zeros = (tensors[prefix + suffix] for suffix in (".qweight", ".scales", ".qzeros"))
    bits, (groups, out) = device_bytes.gptq_bits(zeros.shape[-1], codes.shape[-1]), scales.shape
    sizes = [codes.nbytes, scales.nbytes, zeros.nbytes]
    if bits == 8:
        columns = codes.shape[0] * 4
        sizes = device_bytes.int8_sizes(out, columns, device_bytes.gptq_group(columns, groups), symmetric=False)
    elif bits < 4:
        sizes = [codes.nbytes * 4 // bits, scales.nbytes, groups * out // 2]
    return [*sizes, 2 * tensors[prefix + ".g_idx"].shape[0]] if prefix + ".g_idx" in tensors else sizes


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint: codes, scales, zero points and groups."""
    return sum(tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors)


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by config.json and headers; LocalqError (exit 8) where they are unsound."""
    of = int4_read.layout(checkpoint, prefix, quant_method)
    return of.out, of.columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed | eight_bits.Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    of = int4_read.layout(checkpoint, prefix, quant_method)
    order = int4_read.grouped_order(checkpoint, prefix, of)
    in_order = order is None or torch.equal(order, torch.arange(of.columns))
    scales = int4_read.scales(checkpoint, prefix, quant_method)
    words, zeros = checkpoint.read(prefix + ".qweight"), _zeros(checkpoint, prefix, of.bits)

    def part(rows: slice) -> Tensor:
        stored_codes = words[:, rows].T.contiguous()
        if of.bits == 4 and in_order:
            return stored_codes.view(torch.uint8)
        codes = int4_read.fields(stored_codes, of.bits)
        codes = codes if in_order else codes[:, order]
        return codes if of.bits == 8 else bytes_of(codes)

    packed_order = None if order is None else as_order(order)
    codes = int4_read.repacked(of, part)
    if of.bits == 8:
        packed = eight_bits.Packed(codes, scales, zeros, packed_order, of.group, scales.dtype, in_order)
        return eight_bits.refined(packed)
    return Packed(codes, scales, bytes_of(zeros), packed_order, of.group, in_order)


def _zeros(checkpoint: Checkpoint, prefix: str, bits: int) -> Tensor:
    """Zero points u8 [groups, out]."""
    words, said = checkpoint.read(prefix + ".qzeros"), checkpoint.quantization
    if schemes.int4_layout(said) == "gptq_v2":
        return int4_read.fields(words, bits)
    if bits != 3:
        return int4_read.fields((words.long() + ONES[bits]).to(torch.int32), bits)
    meta = said.get("meta")
    if not (isinstance(meta, dict) and "gptqmodel" in str(meta.get("quantizer")).lower()):
        return int4_read.fields(words, bits) + 1
    constants = torch.tensor(OF_GPTQMODEL).repeat(words.shape[1] // 3)
    return int4_read.fields((words.long() + constants).to(torch.int32), bits)


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in]."""
    group, bits = schemes.int4_scheme(scheme.removesuffix(ORDERED))
    groups = -(-columns // (group or columns))
    shapes = ((columns * bits // 32, out), (groups, out * bits // 32), (groups, out), (columns,))
    dtypes = (torch.int32, torch.int32, torch.float16, torch.int32)
    return dict(zip(suffixes, zip(dtypes, shapes, strict=True), strict=True))


def stored(packed: Packed | eight_bits.Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them as version 1."""
    columns = torch.arange(packed.shape[1], device=packed.codes.device)
    order = columns if packed.order is None else columns_of(packed.order)
    codes, groups = packed.codes, torch.empty_like(columns)
    groups[order] = columns // packed.group
    if isinstance(packed, eight_bits.Packed):
        codes = codes if packed.in_order else codes[:, torch.argsort(order)]
        points = torch.full_like(packed.scales, 128, dtype=torch.uint8) if packed.zeros is None else packed.zeros
        bits, scales = 8, packed.scales.to(packed.stored)
    else:
        codes = codes if packed.in_order else bytes_of(nibbles(codes)[:, torch.argsort(order)])
        bits, points, scales = 4, packed.zeros, packed.scales
    words = codes.contiguous().view(torch.int32).T.contiguous()
    zeros = (points.view(torch.int32).long() - ONES[bits]).to(torch.int32)
    return dict(zip(suffixes, (words, zeros, scales, groups.to(torch.int32)), strict=True))


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name. `skipped` are the Linear modules that stay unquantized."""
    group, bits = schemes.int4_scheme(scheme.removesuffix(ORDERED))
    stated = {"quant_method": quant_method, "bits": bits, "group_size": group or -1, "desc_act": False, "sym": True}
    return {**stated, "checkpoint_format": "gptq", "modules_to_not_convert": skipped or None}
