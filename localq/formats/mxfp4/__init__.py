"""MXFP4, the 4-bit format of the OCP Microscaling specification v1.0, as gpt-oss is published in it.

A matrix [out, in], in % 32 == 0, is cut into blocks of 32 weights along its rows:

blocks  u8 [out, in/32, 16]   two codes a byte; the EVEN column is the LOW nibble (the opposite of NF4)
scales  u8 [out, in/32]       E8M0: byte s stands for 2 ** (s - 127); 255 stands for NaN and is refused as damaged

A code is E2M1: bit 3 the sign, bits 2 and 1 the exponent, bit 0 the mantissa. By code: 0, .5, 1, 1.5, 2, 3, 4, 6, and
the same negated, from -0 on. A weight is its value times its scale, computed in f32 and rounded to the wanted dtype:
bit by bit what transformers' `convert_moe_packed_tensors` gives, the infinities of scales above 2 ** 125 included.
4 + 8/32 = 4.25 bits per weight.

In a checkpoint the parameter N [out, in] is N_blocks and N_scales. A Linear P thus has P.weight_blocks and
P.weight_scales. That use of the rule is ours: no other project publishes or reads Linears of dense models in this
layout. The experts of gpt-oss, which defines it, are stacks [experts, out, ...]: `formats.mxfp4.experts`.

compressed-tensors (`mxfp4-pack-quantized`) has the same bytes as P.weight_packed [out, in/2] and P.weight_scale
[out, in/32], which are read too. Its `decompress` rounds to bf16, in which a weight is exact.

Quantizing follows section 6.3 of the specification: the scale is 2 to the floor of log2 of the largest magnitude in
the block, less 2, the largest exponent of E2M1; weights over it are rounded to the nearest value, ties to the even
code, and saturate at 6 (a block's largest may lie at up to 8). So do the reference implementations of its authors
(microsoft/microxcaling with round "even") and, ties apart, ggml. A block of zeros has scale byte 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import bad_file
from localq.files.json_files import DAMAGED
from localq.formats.checkpoint import Checkpoint
from localq.formats.linear import SlabLinear
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.formats.mxfp4.codec import (
    BLOCK,
    NOT_A_NUMBER,
    VALUES,
    Packed,
    dequantize,
    join,
    joined_bytes,
    quantize,
    sample,
)
from localq.formats.mxfp4.kernel import Mxfp4Operand
from localq.kernels import gemv

__all__ = [
    "BLOCK",
    "VALUES",
    "VARIANTS",
    "Linear",
    "Packed",
    "bytes",
    "checked",
    "dequantize",
    "from_checkpoint",
    "is_quantized",
    "join",
    "joined_bytes",
    "layout",
    "namings",
    "placed_bytes",
    "quant_method",
    "quantization_config",
    "quantize",
    "read_scales",
    "sample",
    "stored",
    "stored_bytes",
    "stored_shape",
    "suffixes",
    "to_tensors",
]

quant_method = "mxfp4"
VARIANTS = ("",)
OWN, COMPRESSED = (".weight_blocks", ".weight_scales"), (".weight_packed", ".weight_scale")
suffixes = OWN
namings = (OWN, COMPRESSED)


class Linear(SlabLinear):
    """y = W x + b with W in MXFP4. x [T, in] of any float dtype -> [T, out] of the same dtype.

    On a GPU the codes are decoded as they are read up to `gemv.ROWS` rows of 16-bit x; above that slabs of rows of W
    are dequantized (`SlabLinear`). On the CPU it is the reference.
    """

    format = "MXFP4"
    codes: Tensor
    scales: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec."""
        return Packed(self.codes, self.scales)

    def operand(self) -> Mxfp4Operand | None:
        """The buffers, where their columns are whole steps of the product."""
        return self._operand if mxfp4_kernel.reads(self._operand) else None

    @property
    def _operand(self) -> Mxfp4Operand:
        return Mxfp4Operand(self.codes, self.scales, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        operand = self.operand()
        if x.shape[0] > gemv.ROWS or x.dtype == torch.float32 or operand is None:
            return self._by_slabs(x)
        return mxfp4_kernel.mxfp4_gemv(x, [operand])

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`."""
        if not self.codes.is_cuda:
            return dequantize(self.packed.rows(slice(first, first + count)), dtype, out)
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        return self.unpack(first, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Every layout."""
        return mxfp4_kernel.mxfp4_dequantize(self._operand, out.dtype, out, (first, len(out)))


def bytes(out: int, columns: int) -> int:
    """Bytes of a matrix on the device: codes and scales."""
    return out * columns // 2 + out * columns // BLOCK


# ---- checkpoints


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in MXFP4."""
    return prefix + OWN[0] in tensors or _is_compressed(tensors, prefix)


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    return sum(placed_bytes(tensors, prefix))


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of codes and of scales, there and on the device."""
    names = COMPRESSED if _is_compressed(tensors, prefix) else OWN
    return [tensors[prefix + suffix].nbytes for suffix in names if prefix + suffix in tensors]


def _is_compressed(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether `prefix` has the names of compressed-tensors, with codes and scales as bytes."""
    codes, scales = (tensors.get(prefix + name) for name in COMPRESSED)
    return codes is not None and scales is not None and codes.dtype == scales.dtype == "uint8"


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors that `to_tensors` makes for a matrix [out, in]."""
    blocks = columns // BLOCK
    return {OWN[0]: (torch.uint8, (out, blocks, BLOCK // 2)), OWN[1]: (torch.uint8, (out, blocks))}


def to_tensors(packed: Packed, prefix: str) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix, by full name, on the CPU; `from_checkpoint` reads them."""
    return {prefix + suffix: tensor.cpu() for suffix, tensor in stored(packed).items()}


def stored(packed: Packed) -> dict[str, Tensor]:
    """The same by suffix, where they lie."""
    return dict(zip(OWN, (packed.codes.reshape(packed.shape[0], -1, BLOCK // 2), packed.scales), strict=True))


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name, with the keys of transformers' `Mxfp4Config`.

    `skipped` are the Linear modules that stay unquantized. `compute_dtype` has no key there: config.json states it.
    """
    return {"quant_method": quant_method, "modules_to_not_convert": skipped, "dequantize": False}


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by its tensors; raises LocalqError (exit 8) where they do not fit together."""
    if not _is_compressed(checkpoint.tensors, prefix):
        out, columns = checked(checkpoint, f"{prefix}.weight", 2)
        return out, columns
    codes, scales = (checkpoint.tensors[prefix + suffix] for suffix in COMPRESSED)
    shape = tuple(codes.shape)
    if len(shape) != 2 or not all(shape) or tuple(scales.shape) != (shape[0], 2 * shape[1] / BLOCK):
        found = f"weight_packed has shape {list(shape)}, but weight_scale has shape {list(scales.shape)}"
        raise bad_file(prefix, f"damaged MXFP4 weights: {found[:120]}", DAMAGED)
    return shape[0], 2 * shape[1]


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    out, columns = stored_shape(checkpoint, prefix)
    names = COMPRESSED if _is_compressed(checkpoint.tensors, prefix) else OWN
    codes = checkpoint.read(prefix + names[0]).reshape(out, columns // 2)
    return Packed(codes, read_scales(checkpoint, prefix + names[1]))


def checked(checkpoint: Checkpoint, name: str, dimensions: int) -> tuple[int, ...]:
    """[..., out, in] of the parameter `name`, of so many dimensions, by what the headers say of its two tensors.

    Raises LocalqError (exit 8) where one is missing and where they do not fit together.
    """
    for suffix in ("_blocks", "_scales"):
        if name + suffix not in checkpoint.tensors:
            raise bad_file(name, f"the checkpoint lacks {name[-60:]}{suffix}", DAMAGED)
    blocks, scales = checkpoint.tensors[f"{name}_blocks"], checkpoint.tensors[f"{name}_scales"]
    shape = tuple(blocks.shape)
    fits = len(shape) == dimensions + 1 and shape[-1] == BLOCK // 2 and all(shape) and tuple(scales.shape) == shape[:-1]
    if not fits or blocks.dtype != "uint8" or scales.dtype != "uint8":
        found = f"blocks are {blocks.dtype} {list(shape)} and scales {scales.dtype} {list(scales.shape)}"
        raise bad_file(name, f"damaged MXFP4 weights: {found[:120]}", DAMAGED)
    return (*shape[:-2], BLOCK * shape[-2])


def read_scales(checkpoint: Checkpoint, name: str) -> Tensor:
    """The scales `name`; raises LocalqError (exit 8) where one of them stands for NaN."""
    scales = checkpoint.read(name)
    if int(scales.max()) == NOT_A_NUMBER:
        raise bad_file(name, f"damaged MXFP4 weights: a scale is {NOT_A_NUMBER}, which encodes NaN", DAMAGED)
    return scales
