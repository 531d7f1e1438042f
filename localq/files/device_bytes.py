"""Bytes that tensors of safetensors files take on a GPU, from their headers. Torch-free.

`formats` places them: a rule here is that of `placed_bytes` of a format, by names, types and shapes. Only the bits of
codes of compressed-tensors are in config.json alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from localq.files import compressed_tensors
from localq.files.safetensors_headers import Entry

_EXPERT_SCALES = re.compile(r"\.(?:experts\.\d+|shared_expert)\.\w+\.weight\.absmax$")
_UNREAD = (".input_scale", ".input_global_scale", ".activation_scale", ".weight_shape")
_ORDERS = (".g_idx", ".weight_g_idx")  # of columns: 16 bits on a GPU
FP8_ROWS, FP8_COLUMNS = 16, 64  # that share a scale on a GPU
INT8_GROUPS = (128, 64, 32)  # columns that share a scale there
Tensors = Mapping[str, Entry]


def of_tensor(tensors: Tensors, name: str, quantization: Mapping[str, Any]) -> int:
    """Bytes of the tensor `name` of `tensors`.

    Scales of NF4 experts are f32 in memory (`Format.placed_bytes`), symmetric 4-bit weights have zero points, scales of
    FP8 are f32, one for a row or for a tile, and stacks of matrices in FP8 are 16 bit. GPTQ and compressed-tensors:
    codes of 2 and 3 bits become 4; scales of 8 bits are f32.
    """
    tensor, (prefix, _, suffix) = tensors[name], name.rpartition(".")
    if name.endswith(_UNREAD):
        return 0
    if name.endswith(_ORDERS):
        return 2 * math.prod(tensor.shape)
    if tensor.dtype == "U8" and _EXPERT_SCALES.search(name):
        return 4 * tensor.nbytes
    if suffix in ("qweight", "qzeros", "scales") and (bits := _gptq_bits(tensors, prefix)) != 4:
        return _gptq(tensors, prefix, suffix, bits)
    if suffix in ("weight_scale", "weight_zero_point") and (columns := _int8_columns(tensors, prefix, quantization)):
        rows, groups = tensors[f"{prefix}.weight_scale"].shape
        symmetric = f"{prefix}.weight_zero_point" not in tensors
        return sum(int8_sizes(rows, columns, columns // groups, symmetric)[1:]) if suffix == "weight_scale" else 0
    return _fp8(tensors, name) if _is_fp8(tensors, name) else tensor.nbytes + _unstored_zeros(tensors, name)


# ---- integers of 8 bits


def int8_group(columns: int, group: int, symmetric: bool) -> int:
    """Columns of a group on a GPU: all of symmetric rows, else the largest of kernels that fits; `group` if none."""
    if symmetric and group >= columns:
        return columns
    return next((size for size in INT8_GROUPS if group % size == 0 and columns % size == 0), group)


def int8_sizes(out: int, columns: int, group: int, symmetric: bool) -> list[int]:
    """Bytes of codes, of scales in f32 and, but for symmetric rows, of zero points."""
    size = int8_group(columns, group, symmetric)
    groups = -(-columns // size)
    sizes = [out * columns, 4 * groups * out, groups * out]
    return sizes[:2] if symmetric and size >= columns else sizes


def gptq_group(columns: int, groups: int) -> int:
    """Columns of a group by the number of groups: a power of two, or all."""
    sizes = (1 << power for power in range(4, 17))
    return columns if groups == 1 else next(size for size in sizes if -(-columns // size) <= groups)


def gptq_bits(words_of_zeros: int, out: int) -> int:
    """Bits of the codes of GPTQ by the words of a row of qzeros, which has `out` codes; 4 where they fit no number."""
    bits, rest = divmod(32 * words_of_zeros, max(out, 1))
    return bits if rest == 0 and bits in (2, 3, 4, 8) else 4


def _gptq_bits(tensors: Tensors, prefix: str) -> int:
    """Bits of the codes of GPTQ; 4 for what is not GPTQ too."""
    zeros, codes, scales = (tensors.get(f"{prefix}.{name}") for name in ("qzeros", "qweight", "scales"))
    if zeros is None or codes is None or scales is None or codes.shape[-1:] != scales.shape[-1:]:
        return 4
    return gptq_bits(zeros.shape[-1], codes.shape[-1])


def _gptq(tensors: Tensors, prefix: str, suffix: str, bits: int) -> int:
    codes, (groups, out) = tensors[f"{prefix}.qweight"], tensors[f"{prefix}.scales"].shape
    if bits == 8:
        columns = codes.shape[0] * 4
        sizes = int8_sizes(out, columns, gptq_group(columns, groups), symmetric=False)
        return dict(zip(("qweight", "scales", "qzeros"), sizes, strict=True))[suffix]
    own = {"qweight": codes.nbytes * 4 // bits, "qzeros": groups * out // 2}
    return own.get(suffix, tensors[f"{prefix}.{suffix}"].nbytes)


def _int8_columns(tensors: Tensors, prefix: str, quantization: Mapping[str, Any]) -> int:
    """Columns of a matrix of 8-bit integers of compressed-tensors; 0 for another one."""
    scale, codes, words = (tensors.get(f"{prefix}.{name}") for name in ("weight_scale", "weight", "weight_packed"))
    if scale is None or len(scale.shape) != 2:
        return 0
    if words is not None and words.dtype == "I32":
        bits = compressed_tensors.packed_bits(quantization, words.shape[-1], scale.shape[1])
        return 4 * words.shape[-1] if bits[0] == 8 else 0
    return codes.shape[-1] if codes is not None and codes.dtype == "I8" else 0


# ---- FP8


def _is_fp8(tensors: Tensors, name: str) -> bool:
    """Return whether `name` is a matrix of FP8 values, or its scales."""
    values = tensors.get(name.removesuffix("_inv").removesuffix("_scale"))
    return values is not None and values.dtype == "F8_E4M3"


def _fp8(tensors: Tensors, name: str) -> int:
    owner = name.removesuffix("_inv").removesuffix("_scale")
    shape, is_matrix = tensors[owner].shape, owner.endswith(".weight") and len(tensors[owner].shape) == 2
    if owner == name:
        return tensors[name].nbytes * (1 if is_matrix else 2)
    return _fp8_scales(shape, tensors[name].shape) if is_matrix else 0


def _fp8_scales(shape: tuple[int, ...], scales: tuple[int, ...]) -> int:
    """Bytes of the scales of an FP8 matrix: of its rows, or of its tiles."""
    rows, columns = shape
    count = math.prod(scales)
    if count == 1 or (len(scales) == 2 and scales[1] == 1 and scales[0] == rows):
        return 4 * rows
    tiles = rows // FP8_ROWS * (columns // FP8_COLUMNS)
    whole = rows % FP8_ROWS == columns % FP8_COLUMNS == 0
    return 4 * (max(tiles, count) if whole else count)


def _unstored_zeros(tensors: Tensors, name: str) -> int:
    """Bytes of 4-bit zero points that symmetric compressed-tensors files leave out: one per scale."""
    prefix = name.removesuffix("_scale")
    codes = tensors.get(f"{prefix}_packed") if prefix != name else None
    is_symmetric = codes is not None and codes.dtype == "I32" and f"{prefix}_zero_point" not in tensors
    return math.prod(tensors[name].shape) // 2 if is_symmetric else 0
