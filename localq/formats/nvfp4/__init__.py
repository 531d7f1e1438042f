"""NVFP4: E2M1 with a scale in e4m3 for every 16 columns and one in f32 for the matrix; read and not made here.

A weight matrix [out, in], in % 16 == 0. Two programs store it. A Linear `P` of a checkpoint has

compressed-tensors (`nvfp4-pack-quantized`)      ModelOpt (`quant_algo` NVFP4, MIXED_PRECISION)
P.weight_packed        u8 [out, in/2]            P.weight          u8 [out, in/2]
P.weight_scale         e4m3 [out, in/16]         P.weight_scale    e4m3 [out, in/16]
P.weight_global_scale  f32 [1]                   P.weight_scale_2  f32 [] or [1]

The even column of a byte is its low nibble. A code is E2M1 as in `formats.mxfp4`. With g for the scale of the matrix

weight[r, k] = value(code[r, k]) * (scale[r, k // 16] / g)   compressed-tensors
weight[r, k] = value(code[r, k]) * (scale[r, k // 16] * g)   ModelOpt

both in f32, rounded last: bit for bit `NVFP4PackedCompressor.decompress` of compressed-tensors, and `dequantize` of
ModelOpt's NVFP4QTensor. The names of the tensors say which of the two it is, not config.json. Scales are positive; NaN
and negative ones are refused as damaged, so is a g that is not a positive number. 4.5 bits per weight.

Quantization of activations (`input_global_scale`, `input_scale`) and of the KV cache is not applied: both stay in 16
bit. Other modules of the same files may be in FP8 (`formats.fp8`), in 8-bit integers or in 16 bit: their tensors say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.json_files import DAMAGED
from localq.formats.checkpoint import Checkpoint
from localq.formats.nvfp4.codec import GROUP, Packed, dequantize, dequantize_rows, sample
from localq.formats.scaled import kernel as scaled_kernel
from localq.formats.scaled.linear import ScaledLinear, ScaledParts

__all__ = ["BLOCK", "VARIANTS", "Linear", "Packed", "bytes", "dequantize", "fits", "from_checkpoint", "is_quantized",
           "layout", "namings", "placed_bytes", "quant_method", "quantization_config", "sample", "stored",
           "stored_bytes", "stored_shape", "suffixes"]  # fmt: skip

quant_method = "nvfp4"
BLOCK = 64  # columns are a multiple of it in what `sample` makes
VARIANTS = ("", "divided")
KIND = "nvfp4"
PACKED, SCALE, GLOBAL = COMPRESSED = (".weight_packed", ".weight_scale", ".weight_global_scale")
MODELOPT = (".weight", SCALE, ".weight_scale_2")
ACTIVATIONS = (".input_global_scale", ".input_scale")  # not read
namings = ((*COMPRESSED, ACTIVATIONS[0]), (*MODELOPT, ACTIVATIONS[1]))
suffixes = namings[0]


class Linear(ScaledLinear):
    """y = W x + b with W in NVFP4."""

    format = "NVFP4"

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        parts = ScaledParts(packed.codes, packed.scales, None, packed.factor)
        super().__init__(packed.shape, KIND, parts, bias, divides=packed.divides)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec; copies where they are tiled."""
        return self._packed(self.row_major)

    def defined_rows(self, parts: ScaledParts, first: int, out: Tensor) -> Tensor:
        """Called by `ScaledLinear`."""
        return dequantize_rows(self._packed(parts), first, out)

    def _packed(self, parts: ScaledParts) -> Packed:
        assert parts.scales is not None
        assert parts.factors is not None
        return Packed(parts.codes, parts.scales, parts.factors, self.divides)


def bytes(out: int, columns: int) -> int:
    """Bytes of a matrix on the device: codes, scales and the scale of the matrix."""
    return out * columns // 2 + out * columns // GROUP + 4


def fits(out: int, columns: int, scheme: str) -> bool:
    """Return whether the kernels read a matrix [out, in]: whole tiles of whole blocks."""
    return scaled_kernel.fits(KIND, out, columns)


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in NVFP4."""
    return _names(tensors, prefix) is not None


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: codes, scales, the scale of the matrix."""
    names = _names(tensors, prefix) or COMPRESSED
    return [tensors[prefix + names[0]].nbytes, tensors[prefix + names[1]].nbytes, 4]


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    names = _names(tensors, prefix) or COMPRESSED
    return sum(tensors[prefix + suffix].nbytes for suffix in names if prefix + suffix in tensors)


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by its headers; LocalqError (exit 8) where they are unsound."""
    names = _names(checkpoint.tensors, prefix) or COMPRESSED
    for name in names:
        if prefix + name not in checkpoint.tensors:
            raise bad_file(prefix, f"the checkpoint lacks {prefix[-60:]}{name}", DAMAGED)
    codes, scales, factor = (checkpoint.tensors[prefix + name] for name in names)
    shape = tuple(codes.shape)
    stated = f"{names[0][1:]} is {codes.dtype} {list(shape)}"
    whole = codes.dtype == "uint8" and len(shape) == 2 and all(shape) and 2 * shape[1] % GROUP == 0
    _require(prefix, whole, f"{stated}; expected uint8 [out, in/2] with in % {GROUP} == 0")
    expected, stated = (shape[0], 2 * shape[1] // GROUP), f"weight_scale is {scales.dtype} {list(scales.shape)}"
    sound = scales.dtype == "float8_e4m3fn" and tuple(scales.shape) == expected
    _require(prefix, sound, f"{stated}; expected float8_e4m3fn {list(expected)}")
    sound, stated = tuple(factor.shape) in ((), (1,)), f"{names[2][1:]} is {factor.dtype} {list(factor.shape)}"
    _require(prefix, factor.dtype == "float32" and sound, f"{stated}; expected float32 [1]")
    return shape[0], 2 * shape[1]


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    stored_shape(checkpoint, prefix)
    names = _names(checkpoint.tensors, prefix) or COMPRESSED
    codes, scales, factor = (checkpoint.read(prefix + name) for name in names)
    scales, factor = scales.contiguous().view(torch.uint8), factor.reshape(1)
    _require(prefix, int(scales.max()) < 0x7F, "weight_scale contains NaN or negative numbers")
    _require(prefix, bool(torch.isfinite(factor).all()) and float(factor) > 0,
             f"{names[2][1:]} is {float(factor)}, not a positive number")  # fmt: skip
    return Packed(codes, scales, factor, names is COMPRESSED)


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in]."""
    names = COMPRESSED if scheme == "divided" else MODELOPT
    shapes = ((out, columns // 2), (out, columns // GROUP), (1,))
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.float32)
    return dict(zip(names, zip(dtypes, shapes, strict=True), strict=True))


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them."""
    names = COMPRESSED if packed.divides else MODELOPT
    tensors = (packed.codes, packed.scales.view(torch.float8_e4m3fn), packed.factor)
    return dict(zip(names, tensors, strict=True))


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json, under localq's name. `skipped`: unquantized Linear modules."""
    return {"quant_method": quant_method, "group_size": GROUP, "exclude_modules": skipped}


def _names(tensors: Mapping[str, Any], prefix: str) -> tuple[str, str, str] | None:
    """Suffixes of its tensors: those of compressed-tensors or of ModelOpt; None where it is not in NVFP4."""
    if prefix + GLOBAL in tensors and prefix + PACKED in tensors:
        return COMPRESSED
    if prefix + MODELOPT[2] in tensors and prefix + MODELOPT[0] in tensors:
        return MODELOPT
    return None


def _require(prefix: str, holds: bool, why: str) -> None:
    if not holds:
        raise bad_file(prefix, f"damaged NVFP4 weights: {why}", DAMAGED)
