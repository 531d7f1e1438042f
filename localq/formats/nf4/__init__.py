"""NF4, exactly as bitsandbytes stores it: 16 fixed values, one scale per 64 weights, the scales themselves in 8 bits.

A weight matrix [out, in], flattened row by row (in % 64 == 0, so that no block crosses a row), n = out * in:

codes          u8  [out, in/2]        two codes a byte; the EVEN column is the HIGH nibble
absmax         u8  [n/64]             code of the block's absmax minus `offset`
nested_absmax  f32 [ceil(n/64/256)]   one scale per 256 of those codes
nested_map     f32 [256]              what an absmax code stands for (`dynamic_map()`)
offset         f32 []                 mean of all absmax

absmax_b = nested_map[absmax[b]] * nested_absmax[b // 256] + offset        fp32: multiply, round, add, round
weight_i = CODE_MAP[code_i] * absmax_{i // 64}                             fp32, then rounded to the wanted dtype

4 + 8/64 + 32/(64*256) = 4.127 bits per weight. Without double quantization absmax is f32 [n/64], 4.5 bits per weight.

In a checkpoint a Linear `P` has P.weight (the codes, [n/2, 1], of any storage dtype: the bytes count), P.weight.absmax,
.quant_map, .nested_absmax, .nested_quant_map, and .quant_state.bitsandbytes__nf4: UTF-8 JSON with quant_type,
blocksize, dtype, shape and, when nested, nested_blocksize, nested_dtype, nested_offset. We pad that JSON with spaces to
`STATE_BYTES`, so that a shard can be laid out before it is quantized; every JSON reader skips them.

Quantizing follows bitsandbytes 0.50: x * (1 / absmax), then the nearest code, ties to the lower one; the 8-bit codes
take the nearest entry of the map, ties to the even index, as its CUDA kernel does. Measured against that kernel on an
H200, 28672 x 8192 random weights: no bit differs for bf16 and f16 input; for f32, 17 of 2.3e8 codes, because the kernel
divides approximately. Where bitsandbytes differs from itself: its CPU library looks the 8-bit codes up in a table of
65,536 bins, which in some 0.3 % of cases gives a neighbour (here: the exact nearest, as on CUDA); its CUDA kernel gives
an all-zero block code 0, that is -1 times a scale that double quantization made unequal to zero (here: code 7, an exact
zero, as on the CPU). `offset` is torch's mean, whose last bit depends on device and threads, here as there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.json_files import DAMAGED, parse_object
from localq.formats.checkpoint import Checkpoint
from localq.formats.nf4.codec import (
    BLOCK,
    CODE_MAP,
    NESTED_BLOCK,
    Packed,
    absmax_f32,
    dequantize,
    dynamic_map,
    join,
    joined_bytes,
    quantize,
    sample,
    unit_absmax,
)
from localq.formats.nf4.linear import Linear

__all__ = [
    "BLOCK",
    "CODE_MAP",
    "NESTED_BLOCK",
    "VARIANTS",
    "Linear",
    "Packed",
    "absmax_f32",
    "bytes",
    "dequantize",
    "dynamic_map",
    "from_checkpoint",
    "is_quantized",
    "join",
    "joined_bytes",
    "layout",
    "placed_bytes",
    "quant_method",
    "quantization_config",
    "quantize",
    "sample",
    "stored",
    "stored_bytes",
    "stored_shape",
    "suffixes",
    "to_tensors",
    "unit_absmax",
]

STATE_BYTES = 256
STATE_SUFFIX = ".weight.quant_state.bitsandbytes__nf4"
FP4_SUFFIX = ".weight.quant_state.bitsandbytes__fp4"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
quant_method = "bitsandbytes"
VARIANTS = ("",)
suffixes = (
    ".weight",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    STATE_SUFFIX,
)


def bytes(out: int, columns: int) -> int:
    """Bytes of a double-quantized matrix on the device: codes, absmax codes, nested scales, map and offset."""
    blocks = out * columns // BLOCK
    return out * columns // 2 + blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + 4 * 256 + 4


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` that its own is on the device: all but the maps, which are shared."""
    names = [prefix + suffix for suffix in (".weight", ".weight.absmax", ".weight.nested_absmax")]
    sizes = [tensors[name].nbytes for name in names if name in tensors]
    return [*sizes, 4] if names[2] in tensors else sizes  # and the offset, which the JSON holds


# ---- checkpoints


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the Linear `prefix` is stored in NF4. Raises LocalqError if it is stored in FP4."""
    if prefix + FP4_SUFFIX in tensors:
        raise bad_file(prefix, "bitsandbytes FP4 is not supported", "Use an NF4 checkpoint.")
    return prefix + STATE_SUFFIX in tensors


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint: codes, scales and tables; of its JSON only the f32 offset."""
    parts = [tensors[prefix + suffix] for suffix in suffixes[:-1] if prefix + suffix in tensors]
    nested = prefix + ".weight.nested_absmax" in tensors
    count: int = sum(part.nbytes for part in parts)
    return count + 4 * nested


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors that `to_tensors` makes for a matrix [out, in]."""
    blocks = out * columns // BLOCK
    return {
        ".weight": (torch.uint8, (out * columns // 2, 1)),
        ".weight.absmax": (torch.uint8, (blocks,)),
        ".weight.quant_map": (torch.float32, (len(CODE_MAP),)),
        ".weight.nested_absmax": (torch.float32, (math.ceil(blocks / NESTED_BLOCK),)),
        ".weight.nested_quant_map": (torch.float32, (256,)),
        STATE_SUFFIX: (torch.uint8, (STATE_BYTES,)),
    }


def to_tensors(packed: Packed, prefix: str) -> dict[str, Tensor]:
    """The checkpoint tensors of a double-quantized matrix, by full name, on the CPU; `from_checkpoint` reads them."""
    return {prefix + suffix: tensor.cpu() for suffix, tensor in stored(packed).items()}


def stored(packed: Packed) -> dict[str, Tensor]:
    """The same by suffix, where they lie; the quantization state on the CPU."""
    if packed.nested_absmax is None or packed.nested_map is None or packed.offset is None:
        raise ValueError("only double-quantized matrices are written")
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": str(packed.dtype).removeprefix("torch."),
        "shape": list(packed.shape),
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": packed.offset.item(),
    }
    text = json.dumps(state).encode().ljust(STATE_BYTES)
    return {
        ".weight": packed.codes.reshape(-1, 1),
        ".weight.absmax": packed.absmax,
        ".weight.quant_map": CODE_MAP,
        ".weight.nested_absmax": packed.nested_absmax,
        ".weight.nested_quant_map": packed.nested_map,
        STATE_SUFFIX: torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name, in the form of transformers' `BitsAndBytesConfig.to_dict()`.

    `skipped` are the Linear modules that stay unquantized.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": compute_dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
    }


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by its state; raises LocalqError (exit 8) where that is unsound."""
    out, columns = _read_state(checkpoint, prefix)["shape"]
    return out, columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    is_quantized(checkpoint.tensors, prefix)  # names FP4
    state = _read_state(checkpoint, prefix)
    out, columns = state["shape"]
    blocks = out * columns // BLOCK
    codes = _raw_bytes(_part(checkpoint, prefix, ".weight"))
    _require(
        prefix,
        codes.numel() == out * columns // 2,
        f"{codes.numel():,} bytes of codes do not match a {out} x {columns} matrix",
    )
    codes = codes.reshape(out, columns // 2)
    quant_map = _floats(checkpoint, prefix, ".weight.quant_map", len(CODE_MAP))
    _require(prefix, torch.allclose(quant_map, CODE_MAP, rtol=0, atol=1e-4), "quant_map is not the NF4 table")
    dtype = DTYPES[state["dtype"]]
    if "nested_offset" not in state:
        absmax = _floats(checkpoint, prefix, ".weight.absmax", blocks)
        return Packed(codes, absmax, None, None, None, (out, columns), dtype)
    absmax = _part(checkpoint, prefix, ".weight.absmax")
    _require(prefix, absmax.dtype == torch.uint8 and absmax.shape == (blocks,), "absmax does not match the shape")
    nested_absmax = _floats(checkpoint, prefix, ".weight.nested_absmax", math.ceil(blocks / NESTED_BLOCK))
    nested_map = _floats(checkpoint, prefix, ".weight.nested_quant_map", 256)
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32)
    return Packed(codes, absmax, nested_absmax, nested_map, offset, (out, columns), dtype)


def _read_state(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    """The JSON of the quantization state, every field checked."""
    raw = _part(checkpoint, prefix, STATE_SUFFIX)
    _require(prefix, raw.dtype == torch.uint8 and raw.numel() <= 4096, "quant_state is malformed or too long")
    try:
        text = raw.numpy().tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_file(prefix, "quant_state is not UTF-8 text", DAMAGED) from error
    state = parse_object(text, f"{prefix} (quant_state)")
    shape: Any = state.get("shape")
    sizes = (
        isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and 0 < size < 2**31 for size in shape)
    )
    _require(
        prefix, sizes and shape[1] % BLOCK == 0, f"shape {str(shape)[:60]} is not [out, in] with in % {BLOCK} == 0"
    )
    _require(
        prefix, state.get("quant_type") == "nf4", f"quant_type is {str(state.get('quant_type'))[:20]!r}, not 'nf4'"
    )
    _require(prefix, state.get("blocksize") == BLOCK, f"blocksize is {str(state.get('blocksize'))[:20]}, not {BLOCK}")
    _require(prefix, isinstance(state.get("dtype"), str) and state["dtype"] in DTYPES, "unknown dtype")
    if "nested_offset" in state:
        nested = state.get("nested_blocksize")
        _require(prefix, nested == NESTED_BLOCK, f"nested_blocksize is {str(nested)[:20]}, not {NESTED_BLOCK}")
        offset = state["nested_offset"]
        small = type(offset) in (int, float) and abs(offset) <= torch.finfo(torch.float32).max
        _require(prefix, small, "nested_offset is not a 32-bit number")
    return state


def _part(checkpoint: Checkpoint, prefix: str, suffix: str) -> Tensor:
    if prefix + suffix not in checkpoint.tensors:
        raise bad_file(prefix, f"the checkpoint lacks {prefix + suffix}", DAMAGED)
    return checkpoint.read(prefix + suffix)


def _floats(checkpoint: Checkpoint, prefix: str, suffix: str, count: int) -> Tensor:
    """A finite f32 tensor of `count` values."""
    values = _part(checkpoint, prefix, suffix)
    fits = values.dtype == torch.float32 and values.shape == (count,)
    found = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    _require(prefix, fits, f"{suffix[8:]} is {found}; expected float32 [{count}]")
    _require(prefix, bool(torch.isfinite(values).all()), f"{suffix[8:]} contains NaN or infinity")
    return values


def _raw_bytes(stored: Tensor) -> Tensor:
    """u8 view of the stored codes: `bnb_4bit_quant_storage` may name a wider dtype for the same bytes."""
    return stored.contiguous().reshape(-1).view(torch.uint8)


def _require(prefix: str, holds: bool, why: str) -> None:
    if not holds:
        raise bad_file(prefix, f"damaged NF4 weights: {why}", DAMAGED)
