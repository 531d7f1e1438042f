"""compressed-tensors of integers in 4 and 8 bits: neighbouring INPUTS of one output in a word, row by row, or in bytes.

A weight matrix [out, in] in groups of G columns (16 to 1024, or all of a row: "channel"), in a multiple of G, out even.
With b bits a Linear `P` of a checkpoint has, in the layout `pack-quantized`

P.weight_packed      int32 [out, in b / 32]           bits b i ... of word [r, j]: column 32 j / b + i of row r, and
                                                      2^(b-1)
P.weight_scale       f     [out, in / G]              bfloat16, float16 or float32; negative ones occur (AutoRound)
P.weight_shape       int64 [2]                        out, in
P.weight_zero_point  int32 [ceil(out b / 32), in / G] only if not symmetric. Bits b i ... of word [c, g]: the zero point
                                                      of row 32 c / b + i, plus 2^(b-1)
P.weight_g_idx       int32 [in]                       the group of each column (`actorder` "group"); without it, or with
                                                      -1 throughout: k // G

and in `int-quantized`, of 8 bits

P.weight             int8  [out, in]                  values
P.weight_scale       f     [out, in / G]
P.weight_zero_point  int8  [out, in / G]              only if not symmetric

weight[r, k] = (value[r, k] - zero[r, group(k)]) * scale[r, group(k)], rounded once to the type of the scales

Packed values have 2^(b-1) added, as both have in memory, so the difference of the codes is that of the values;
symmetric weights have that code for zero. This is `decompress` of the compressed-tensors package, bit for bit; versions
from 0.20 on no longer know g_idx. In memory columns lie in the order of their groups, scales and zero points group by
group (`formats.int4.codec`, of 8 bits `formats.int4.eight_bits`). On a device 4 + 20 / G bits per weight, where
symmetric files have 4 + 16 / G; of 8 bits 8 + 40 / G, of symmetric rows 8.

config.json's `config_groups` may have several entries for different modules; one must agree with the tensors of P
(`files.compressed_tensors`). Modules without these tensors stay in 16 bit, whatever `targets` and `ignore` say.
Quantization of activations and of the KV cache is not applied: both stay in 16 bit. NVFP4, MXFP4 and FP8 are formats of
their own. Other numbers of bits, sparse weights and rotated inputs are refused by name (`stored_format.unreadable`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.files import compressed_tensors, device_bytes, schemes
from localq.formats.checkpoint import Checkpoint
from localq.formats.int4 import eight_bits, widths
from localq.formats.int4 import read as int4_read
from localq.formats.int4.awq import bytes
from localq.formats.int4.codec import (
    VARIANTS,
    Packed,
    as_order,
    bytes_of,
    columns_of,
    nibbles,
)
from localq.formats.int4.widths import dequantize, fits, multiplied, sample

__all__ = [
    "BLOCK",
    "VARIANTS",
    "Linear",
    "Packed",
    "bytes",
    "dequantize",
    "fits",
    "from_checkpoint",
    "is_quantized",
    "layout",
    "multiplied",
    "namings",
    "placed_bytes",
    "quant_method",
    "quantization_config",
    "sample",
    "sized_by_checkpoint",
    "stored",
    "stored_bytes",
    "stored_shape",
    "suffixes",
]  # fmt: skip

quant_method = compressed_tensors.METHOD
BLOCK = 64  # columns are a multiple of it in what `sample` makes
PACKED, SCALE, SHAPE, ZEROS, G_IDX = (
    ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"
)  # fmt: skip
BYTES = ".weight"  # of int-quantized
suffixes = (PACKED, SCALE, SHAPE, ZEROS, G_IDX)
namings = ((PACKED, SCALE, SHAPE, ZEROS, G_IDX), (BYTES, SCALE, ZEROS))
SYMMETRIC = 0x88  # two zero points of 8
sized_by_checkpoint = True  # words do not say how many bits a code has
SIGN = 0x80  # of a byte: its value plus 128


Linear = widths.linear_of("compressed-tensors")


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in compressed-tensors."""
    return prefix + PACKED in tensors or _is_bytes(tensors, prefix)


def _is_bytes(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the tensors of `prefix` are int-quantized."""
    return (
        prefix + PACKED not in tensors
        and prefix + BYTES in tensors
        and prefix + SCALE in tensors
        and tensors[prefix + BYTES].dtype == "int8"
    )


def placed_bytes(tensors: Mapping[str, Any], prefix: str, checkpoint: Checkpoint | None = None) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: codes, scales, zero points; the order in 16 bits.

    checkpoint   says how many bits packed codes have; without it 4
    """
    scale, is_bytes = tensors[prefix + SCALE], _is_bytes(tensors, prefix)
    codes, (rows, groups) = tensors[prefix + (BYTES if is_bytes else PACKED)], scale.shape
    sizes = [codes.nbytes, scale.nbytes, rows // 2 * groups]
    if is_bytes or (checkpoint is not None and _bits(checkpoint, prefix) == 8):
        columns = codes.shape[1] * (1 if is_bytes else 4)
        sizes = device_bytes.int8_sizes(rows, columns, columns // groups, prefix + ZEROS not in tensors)
    return [*sizes, 2 * tensors[prefix + G_IDX].shape[0]] if prefix + G_IDX in tensors else sizes


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    suffixes_of = namings[_is_bytes(tensors, prefix)]
    return sum(tensors[prefix + suffix].nbytes for suffix in suffixes_of if prefix + suffix in tensors)


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by config.json and headers; LocalqError (exit 8) where they are unsound."""
    of = _layout(checkpoint, prefix)
    return of.out, of.columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed | eight_bits.Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    of = _layout(checkpoint, prefix)
    is_bytes = _is_bytes(checkpoint.tensors, prefix)
    if not is_bytes:
        stated = checkpoint.read(prefix + SHAPE).tolist()
        why = f"weight_shape is {stated}, but weight_packed has {of.out} x {of.columns} codes"
        int4_read.require(prefix, quant_method, stated == [of.out, of.columns], why)
    order = _order(checkpoint, prefix, of)
    in_order = order is None or torch.equal(order, torch.arange(of.columns))
    scales = int4_read.scales(checkpoint, prefix, quant_method, SCALE).T.contiguous()
    codes = checkpoint.read(prefix + (BYTES if is_bytes else PACKED)).contiguous().view(torch.uint8)
    codes = codes ^ SIGN if is_bytes else codes
    if not in_order:
        stored_codes = codes
        codes = int4_read.repacked(of, lambda rows: _reordered(stored_codes[rows], order, of.bits))
    packed_order = None if order is None else as_order(order)
    if of.bits == 8:
        zeros = _zeros_of_bytes(checkpoint, prefix, of)
        return eight_bits.refined(
            eight_bits.Packed(codes, scales, zeros, packed_order, of.group, scales.dtype, in_order)
        )
    return Packed(codes, scales, _zeros(checkpoint, prefix, of), packed_order, of.group, in_order)


def _reordered(codes: Tensor, order: Tensor | None, bits: int) -> Tensor:
    """Codes of some rows with their columns in `order`."""
    return codes[:, order] if bits == 8 else bytes_of(nibbles(codes)[:, order])


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in] with zero points."""
    group, bits = schemes.int4_scheme(scheme)
    groups, width = -(-columns // (group or columns)), 32 // bits
    return {
        PACKED: (torch.int32, (out, columns // width)),
        SCALE: (torch.float16, (out, groups)),
        SHAPE: (torch.int64, (2,)),
        ZEROS: (torch.int32, (-(-out // width), groups)),
    }


def stored(packed: Packed | eight_bits.Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them."""
    (out, columns), device = packed.shape, packed.codes.device
    made = {SHAPE: torch.tensor([out, columns], device=device)}
    order = None if packed.order is None else columns_of(packed.order)
    codes, back = packed.codes, None if order is None or packed.in_order else torch.argsort(order)
    if isinstance(packed, eight_bits.Packed):
        codes = codes if back is None else codes[:, back]
        made[SCALE], points, per_word = packed.scales.T.to(packed.stored).contiguous(), packed.zeros, 4
    else:
        codes = codes if back is None else bytes_of(nibbles(codes)[:, back])
        made[SCALE], points, per_word = packed.scales.T.contiguous(), packed.zeros, int4_read.WORD
    if points is not None:
        zeros = points.new_zeros(len(points), -(-out // per_word) * 4)
        zeros[:, : points.shape[1]] = points
        made[ZEROS] = zeros.view(torch.int32).T.contiguous()
    if order is not None:
        groups = torch.empty_like(order)
        groups[order] = torch.arange(columns, device=device) // packed.group
        made[G_IDX] = groups.to(torch.int32)
    return {PACKED: codes.contiguous().view(torch.int32), **made}


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name. `skipped` are the Linear modules that stay unquantized."""
    group, bits = schemes.int4_scheme(scheme)
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "dynamic": False, **strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": compressed_tensors.PACKED}}
    stated = {"quant_method": quant_method, "format": compressed_tensors.PACKED, "quantization_status": "compressed"}
    return {**stated, "config_groups": groups, "ignore": skipped}


def _layout(checkpoint: Checkpoint, prefix: str) -> int4_read.Layout:
    """Sizes of the Linear `prefix`, by headers and config.json alone."""
    sure, tensors = functools.partial(int4_read.require, prefix, quant_method), checkpoint.tensors
    is_bytes = _is_bytes(tensors, prefix)
    int4_read.check_named(checkpoint, prefix, quant_method, (BYTES, SCALE) if is_bytes else (PACKED, SCALE, SHAPE))
    codes, scale = tensors[prefix + (BYTES if is_bytes else PACKED)], tensors[prefix + SCALE]
    int4_read.check_matrix(sure, "weight" if is_bytes else "weight_packed", codes, ("int8" if is_bytes else "int32",))
    int4_read.check_matrix(sure, "weight_scale", scale, int4_read.FLOATS)
    out, groups = codes.shape[0], scale.shape[1]
    bits, columns = 8, codes.shape[1]
    if not is_bytes:
        shape = tensors[prefix + SHAPE]
        sound = shape.dtype in ("int32", "int64") and tuple(shape.shape) == (2,)
        sure(sound, f"weight_shape is {shape.dtype} {list(shape.shape)}; expected int64 [2]")
        bits = _bits(checkpoint, prefix)
        columns = columns * 32 // bits
    sure(out % 2 == 0, f"an odd number of rows ({out}) is not supported")
    sure(scale.shape[0] == out, f"weight_scale has shape {list(scale.shape)}; expected {[out, groups]}")
    sure(columns % groups == 0, f"{columns} columns cannot be split evenly into {groups} groups")
    has_zeros = prefix + ZEROS in tensors
    if has_zeros:
        zeros, expected = tensors[prefix + ZEROS], (out, groups) if is_bytes else (-(-out * bits // 32), groups)
        int4_read.check_matrix(sure, "weight_zero_point", zeros, ("int8" if is_bytes else "int32",))
        found = tuple(zeros.shape)
        sure(found == expected, f"weight_zero_point has shape {list(found)}; expected {list(expected)}")
    if prefix + G_IDX in tensors:
        int4_read.check_groups(sure, "weight_g_idx", tensors[prefix + G_IDX], columns)
    of = int4_read.Layout(out, columns, groups, columns // groups, bits)
    sizes = int4_read.SIZES
    sure(
        groups == 1 or of.group in sizes,
        f"groups of {of.group} columns are not supported (only {', '.join(map(str, sizes))} and whole rows)",
    )
    _check_stated(checkpoint.quantization, of, has_zeros, sure)
    return of


def _bits(checkpoint: Checkpoint, prefix: str) -> int:
    """Bits of packed codes: those of an entry of config.json; weight_shape decides between several."""
    words, groups = checkpoint.tensors[prefix + PACKED].shape[-1], checkpoint.tensors[prefix + SCALE].shape[-1]
    possible = compressed_tensors.packed_bits(checkpoint.quantization, words, groups)
    if len(possible) > 1 and tuple(checkpoint.tensors[prefix + SHAPE].shape) == (2,):
        columns = int(checkpoint.read(prefix + SHAPE)[1])
        possible = [bits for bits in possible if words == -(-columns * bits // 32)] or possible
    return possible[0]


def _check_stated(said: Mapping[str, Any], of: int4_read.Layout, has_zeros: bool, sure: int4_read.Sure) -> None:
    """Some entry of `config_groups` has these groups, and zero points as they are."""
    stated = compressed_tensors.weight_groups(said)
    found = f"{of.groups} groups of {of.group} columns {'with' if has_zeros else 'without'} zero points"
    entries = "; ".join(dict.fromkeys(map(str, stated[:4]))) or "no supported groups"
    agrees = any(
        each.symmetric != has_zeros
        and each.bits == of.bits
        and (each.group == of.group or (each.group == -1 and of.groups == 1))
        for each in stated
    )
    sure(agrees, f"the weights have {found}, but config.json specifies {entries}")


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


def _zeros_of_bytes(checkpoint: Checkpoint, prefix: str, of: int4_read.Layout) -> Tensor | None:
    """Zero points u8 [groups, out] of 8 bits; None for symmetric weights."""
    if prefix + ZEROS not in checkpoint.tensors:
        return None
    words = checkpoint.read(prefix + ZEROS).T.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return words ^ SIGN if _is_bytes(checkpoint.tensors, prefix) else words[:, : of.out].contiguous()


def _zeros(checkpoint: Checkpoint, prefix: str, of: int4_read.Layout) -> Tensor:
    """Zero points u8 [groups, out / 2], as the codec has them."""
    if prefix + ZEROS not in checkpoint.tensors:
        return torch.full((of.groups, of.out // 2), SYMMETRIC, dtype=torch.uint8)
    # A clone, because `contiguous` keeps the strides of a single word of all rows, of which `view` makes no bytes.
    words = checkpoint.read(prefix + ZEROS).T.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)[:, : of.out // 2].contiguous()
