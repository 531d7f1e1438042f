"""compressed-tensors `pack-quantized` in 4 bits: eight neighbouring INPUTS of one output in a word, row by row.

A weight matrix [out, in] in groups of G columns (16 to 1024, or all of a row: "channel"), in a multiple of G and of 8,
out even. A Linear `P` of a checkpoint has

P.weight_packed      int32 [out, in / 8]            bits 4i ... 4i + 3 of word [r, j]: column 8j + i of row r, plus 8
P.weight_scale       f     [out, in / G]            bfloat16, float16 or float32; negative ones occur (AutoRound)
P.weight_shape       int64 [2]                      out, in
P.weight_zero_point  int32 [ceil(out / 8), in / G]  only if not symmetric. Bits 4i ... 4i + 3 of word [c, g]: the zero
                                                    point of row 8c + i, plus 8
P.weight_g_idx       int32 [in]                     the group of each column (`actorder` "group"); without it, or with
                                                    -1 throughout: k // G

weight[r, k] = (value[r, k] - zero[r, group(k)]) * scale[r, group(k)], rounded once to the type of the scales

Both values have 8 added when stored, so the difference of the codes is that of the values; symmetric weights have the
code 8 for zero. This is `PackedQuantizationCompressor.decompress` of the compressed-tensors package, bit for bit;
versions from 0.20 on no longer know g_idx. In memory columns lie in the order of their groups, scales and zero points
group by group (`formats.int4.codec`). 4 + 20 / G bits per weight, where symmetric files have 4 + 16 / G.

config.json's `config_groups` may have several entries for different modules; one must agree with the tensors of P
(`files.compressed_tensors`). Modules without these tensors stay in 16 bit, whatever `targets` and `ignore` say.
Quantization of activations and of the KV cache is not applied: both stay in 16 bit. FP8 (`float-quantized`) is a source
(`formats.fp8_source`). Other layouts (`int-quantized`, NVFP4, MXFP4), other numbers of bits, sparse weights and rotated
inputs are refused by name (`stored_format.unreadable`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.files import compressed_tensors, schemes
from localq.formats.checkpoint import Checkpoint
from localq.formats.int4 import read as int4_read
from localq.formats.int4.awq import bytes
from localq.formats.int4.codec import (
    VARIANTS,
    Packed,
    as_order,
    bytes_of,
    columns_of,
    dequantize,
    multiplied,
    nibbles,
    sample,
)
from localq.formats.int4.linear import Int4Linear
from localq.formats.int4.tiles import fits

__all__ = ["BLOCK", "VARIANTS", "Linear", "Packed", "bytes", "dequantize", "fits", "from_checkpoint", "is_quantized",
           "layout", "multiplied", "placed_bytes", "quant_method", "quantization_config", "sample", "stored",
           "stored_bytes", "stored_shape", "suffixes"]  # fmt: skip

quant_method = compressed_tensors.METHOD
BLOCK = 64  # columns are a multiple of it in what `sample` makes
PACKED, SCALE, SHAPE, ZEROS, G_IDX = (
    ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"
)  # fmt: skip
suffixes = (PACKED, SCALE, SHAPE, ZEROS, G_IDX)
SYMMETRIC = 0x88  # two zero points of 8


class Linear(Int4Linear):
    """y = W x + b with W in compressed-tensors."""

    format = "compressed-tensors"


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Does the checkpoint hold the Linear `prefix` in compressed-tensors?"""
    return prefix + PACKED in tensors


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: codes, scales, zero points; the order in 16 bits."""
    codes, scale = tensors[prefix + PACKED], tensors[prefix + SCALE]
    rows, groups = scale.shape
    sizes = [codes.nbytes, scale.nbytes, rows // 2 * groups]
    return [*sizes, 2 * tensors[prefix + G_IDX].shape[0]] if prefix + G_IDX in tensors else sizes


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    return sum(tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors)


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by config.json and headers; LocalqError (exit 8) where they are unsound."""
    of = _layout(checkpoint, prefix)
    return of.out, of.columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    of = _layout(checkpoint, prefix)
    stated = checkpoint.read(prefix + SHAPE).tolist()
    why = f"weight_shape is {stated}, but weight_packed has {of.out} x {of.columns} codes"
    int4_read.require(prefix, quant_method, stated == [of.out, of.columns], why)
    order = _order(checkpoint, prefix, of)
    in_order = order is None or torch.equal(order, torch.arange(of.columns))
    scales = int4_read.scales(checkpoint, prefix, quant_method, SCALE).T.contiguous()
    codes = checkpoint.read(prefix + PACKED).contiguous().view(torch.uint8)
    if not in_order:
        stored_codes = codes
        codes = int4_read.repacked(of, lambda rows: bytes_of(nibbles(stored_codes[rows])[:, order]))
    packed_order = None if order is None else as_order(order)
    return Packed(codes, scales, _zeros(checkpoint, prefix, of), packed_order, of.group, in_order)


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in] with zero points."""
    groups, width = -(-columns // (schemes.int4_group(scheme) or columns)), int4_read.WORD
    return {
        PACKED: (torch.int32, (out, columns // width)),
        SCALE: (torch.float16, (out, groups)),
        SHAPE: (torch.int64, (2,)),
        ZEROS: (torch.int32, (-(-out // width), groups)),
    }


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them."""
    out, columns = packed.shape
    codes, device = packed.codes, packed.codes.device
    zeros = packed.zeros.new_zeros(len(packed.zeros), -(-out // int4_read.WORD) * 4)
    zeros[:, : out // 2] = packed.zeros
    made = {
        SCALE: packed.scales.T.contiguous(),
        SHAPE: torch.tensor([out, columns], device=device),
        ZEROS: zeros.view(torch.int32).T.contiguous(),
    }
    if packed.order is not None:
        order = columns_of(packed.order)
        groups = torch.empty_like(order)
        groups[order] = torch.arange(columns, device=device) // packed.group
        made[G_IDX] = groups.to(torch.int32)
        codes = codes if packed.in_order else bytes_of(nibbles(codes)[:, torch.argsort(order)])
    return {PACKED: codes.contiguous().view(torch.int32), **made}


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name. `skipped` are the Linear modules that stay unquantized."""
    group = schemes.int4_group(scheme)
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "dynamic": False, **strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": compressed_tensors.PACKED}}
    stated = {"quant_method": quant_method, "format": compressed_tensors.PACKED, "quantization_status": "compressed"}
    return {**stated, "config_groups": groups, "ignore": skipped}


def _layout(checkpoint: Checkpoint, prefix: str) -> int4_read.Layout:
    """Sizes of the Linear `prefix`, by headers and config.json alone."""
    sure, tensors = functools.partial(int4_read.require, prefix, quant_method), checkpoint.tensors
    int4_read.check_named(checkpoint, prefix, quant_method, (PACKED, SCALE, SHAPE))
    packed, scale, shape = (tensors[prefix + suffix] for suffix in (PACKED, SCALE, SHAPE))
    int4_read.check_matrix(sure, "weight_packed", packed, ("int32",))
    int4_read.check_matrix(sure, "weight_scale", scale, int4_read.FLOATS)
    sound = shape.dtype in ("int32", "int64") and tuple(shape.shape) == (2,)
    sure(sound, f"weight_shape is {shape.dtype} {list(shape.shape)}, expected int64 [2]")
    out, columns = packed.shape[0], packed.shape[1] * int4_read.WORD
    groups = scale.shape[1]
    sure(out % 2 == 0, f"{out} rows are odd, which is not supported")
    sure(scale.shape[0] == out, f"weight_scale has shape {list(scale.shape)}, expected {[out, groups]}")
    sure(columns % groups == 0, f"{columns} columns are not a multiple of {groups} groups")
    has_zeros, expected = prefix + ZEROS in tensors, (-(-out // int4_read.WORD), groups)
    if has_zeros:
        zeros = tensors[prefix + ZEROS]
        int4_read.check_matrix(sure, "weight_zero_point", zeros, ("int32",))
        sure(
            tuple(zeros.shape) == expected,
            f"weight_zero_point has shape {list(zeros.shape)}, expected {list(expected)}",
        )
    if prefix + G_IDX in tensors:
        int4_read.check_groups(sure, "weight_g_idx", tensors[prefix + G_IDX], columns)
    of = int4_read.Layout(out, columns, groups, columns // groups)
    sizes = int4_read.SIZES
    sure(groups == 1 or of.group in sizes, f"groups of {of.group} columns; {sizes} and whole rows are supported")
    _check_stated(checkpoint.quantization, of, has_zeros, sure)
    return of


def _check_stated(said: Mapping[str, Any], of: int4_read.Layout, has_zeros: bool, sure: int4_read.Sure) -> None:
    """Some entry of `config_groups` has these groups, and zero points as they are."""
    stated = compressed_tensors.weight_groups(said)
    found = f"{of.groups} groups of {of.group} columns {'with' if has_zeros else 'without'} zero points"
    entries = "; ".join(dict.fromkeys(map(str, stated[:4]))) or "nothing that is supported"
    agrees = any(
        each.symmetric != has_zeros and (each.group == of.group or (each.group == -1 and of.groups == 1))
        for each in stated
    )
    sure(agrees, f"{found} do not match config.json, which specifies {entries}")


def _order(checkpoint: Checkpoint, prefix: str, of: int4_read.Layout) -> Tensor | None:
    """weight_g_idx as the columns in the order of their groups, int64 [in]; None where the checkpoint has none."""
    sure, stated = functools.partial(int4_read.require, prefix, quant_method), checkpoint.quantization
    if prefix + G_IDX not in checkpoint.tensors:
        entries = compressed_tensors.weight_groups(stated)
        must = of.groups > 1 and bool(entries) and all(each.ordered for each in entries)
        sure(not must, "actorder is 'group', but weight_g_idx is missing")
        return None
    groups = checkpoint.read(prefix + G_IDX).long()
    if bool((groups == -1).all()):
        return torch.arange(of.columns)
    return int4_read.columns_by_group(groups, of, sure, "weight_g_idx")


def _zeros(checkpoint: Checkpoint, prefix: str, of: int4_read.Layout) -> Tensor:
    """Zero points u8 [groups, out / 2], as the codec has them."""
    if prefix + ZEROS not in checkpoint.tensors:
        return torch.full((of.groups, of.out // 2), SYMMETRIC, dtype=torch.uint8)
    # A clone, because `contiguous` keeps the strides of a single word of all rows, of which `view` makes no bytes.
    words = checkpoint.read(prefix + ZEROS).T.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)[:, : of.out // 2].contiguous()
