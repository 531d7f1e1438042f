"""Blocks of GGUF files, kept as llama.cpp stores them: 24 types of 1 to 8 bits, mixed in one model.

A weight matrix [out, in] is rows of blocks of one type, each of 32 or 256 neighbouring weights of a row with its scales
(`codec`; sizes: `files.gguf.block_types`). `dequantize` is `gguf.quants.dequantize`, bit for bit, in float32. A Linear
`P` of a checkpoint has

P.blocks      u8 [out, in / values * bytes]   as in the file, rows and whole matrices in the order of Hugging Face
P.block_type  int32 [1]                       ggml's number of the type (GGMLQuantizationType)
P.places      int16 [in / 8]                  only where columns are stored in another order: the bits of a u16;
                                              columns 8i .. 8i + 7 are the stored ones from 8 places[i] on
P.factor      f32 [1]                         only of NVFP4 whose file has one beside the matrix: multiplies the weights

These are names of localq: `formats.checkpoint` gives the tensors of a .gguf file by them. Kernels read the types of
`tiles.TILED_TYPES`, in an order of their own; torch dequantizes Q1_0 for every product, which is
slow. Matrices in MXFP4 get the names of `formats.mxfp4`, where its kernels read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.gguf.block_types import BLOCK_TYPES, WITH_FACTORS, by_name
from localq.files.json_files import DAMAGED
from localq.formats.checkpoint import Checkpoint
from localq.formats.gguf.codec import UNPACK, Packed, dequantize
from localq.formats.gguf.linear import Linear
from localq.formats.gguf.samples import sample
from localq.formats.gguf.tiles import TILED_TYPES, has_tiles

__all__ = ["BLOCK", "VARIANTS", "Linear", "Packed", "bytes", "dequantize", "fits", "from_checkpoint", "is_quantized",
           "layout", "multiplied", "placed_bytes", "quant_method", "quantization_config", "sample", "stored",
           "stored_bytes", "stored_shape", "suffixes"]  # fmt: skip

quant_method = "gguf"
BLOCK = 256  # columns are a multiple of it in what `sample` makes in every type
VARIANTS = ("Q4_K", *(type for type in TILED_TYPES if type != "Q4_K"))
suffixes = (".blocks", ".block_type", ".places", ".factor")


def bytes(out: int, columns: int, type: str = "Q4_K") -> int:
    """Bytes of a matrix on the device: its blocks."""
    kind = by_name(type)
    return out * columns // kind.values * kind.bytes


def fits(out: int, columns: int, scheme: str) -> bool:
    """Return whether the kernels read a matrix [out, in] in blocks of `scheme`: whole tiles, of whole blocks."""
    return has_tiles(scheme, (out, columns)) and columns % by_name(scheme).values == 0


def multiplied(packed: Packed) -> Tensor:
    """f32 [out, in]: the weights as products take them, without a rounding to 16 bit."""
    return dequantize(packed, torch.float32)


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in GGUF blocks."""
    return prefix + ".blocks" in tensors


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: blocks, and places where it has them."""
    names = (prefix + suffix for suffix in (".blocks", ".places"))
    return [tensors[name].nbytes for name in names if name in tensors]


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    return sum(placed_bytes(tensors, prefix))


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, from headers and the type; LocalqError (exit 8) where they are unsound."""
    blocks, kind = checkpoint.tensors[prefix + ".blocks"], by_name(_type(checkpoint, prefix))
    if blocks.dtype != "uint8" or len(blocks.shape) != 2 or not all(blocks.shape) or blocks.shape[1] % kind.bytes:
        why = (
            f"{blocks.dtype} data of shape {list(blocks.shape)} is not a matrix of {kind.bytes}-byte {kind.name} blocks"
        )
        raise bad_file(prefix, why, DAMAGED)
    shape = blocks.shape[0], blocks.shape[1] // kind.bytes * kind.values
    places = checkpoint.tensors.get(prefix + ".places")
    if places is not None and (places.dtype != "int16" or places.shape != (shape[1] // 8,)):
        raise bad_file(prefix, f"places have shape {list(places.shape)}; expected [{shape[1] // 8}]", DAMAGED)
    return shape


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    stored_shape(checkpoint, prefix)
    places = checkpoint.read(prefix + ".places") if prefix + ".places" in checkpoint.tensors else None
    if places is not None and not torch.equal(places.sort().values, torch.arange(len(places), dtype=torch.int16)):
        raise bad_file(prefix, "places are not a permutation of the columns", DAMAGED)
    return Packed(checkpoint.read(prefix + ".blocks"), _type(checkpoint, prefix), places, _factor(checkpoint, prefix))


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in], in NVFP4 with a factor."""
    kind = by_name(scheme or VARIANTS[0])
    shape = out, columns // kind.values * kind.bytes
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {".blocks": (torch.uint8, shape)}
    tensors[".block_type"] = torch.int32, (1,)
    if kind.name == WITH_FACTORS:
        tensors[".factor"] = torch.float32, (1,)
    return tensors


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them."""
    number = torch.tensor([by_name(packed.type).number], dtype=torch.int32, device=packed.blocks.device)
    tensors = {".blocks": packed.blocks, ".block_type": number}
    if packed.places is not None:
        tensors[".places"] = packed.places
    if packed.factor != 1:
        tensors[".factor"] = torch.tensor([packed.factor], dtype=torch.float32, device=packed.blocks.device)
    return tensors


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json. `skipped`: the Linear modules that stay unquantized."""
    return {"quant_method": quant_method, "modules_to_not_convert": skipped or None}


def _factor(checkpoint: Checkpoint, prefix: str) -> float:
    """The factor of the weights. Raises LocalqError (exit 8) unless it is a number."""
    name = prefix + ".factor"
    if name not in checkpoint.tensors:
        return 1.0
    stored = checkpoint.read(name)
    if stored.shape != (1,) or not bool(torch.isfinite(stored).all()):
        raise bad_file(prefix, f"its factor is {stored.flatten()[:4].tolist()}; expected one number", DAMAGED)
    return float(stored)


def _type(checkpoint: Checkpoint, prefix: str) -> str:
    """The name of the block type; LocalqError (exit 8) for one without a definition."""
    name = prefix + ".block_type"
    if name not in checkpoint.tensors or checkpoint.tensors[name].shape != (1,):
        raise bad_file(prefix, f"the checkpoint lacks {name}", DAMAGED)
    number = int(checkpoint.read(name))
    kind = BLOCK_TYPES.get(number)
    if kind is None or kind.name not in UNPACK:
        raise bad_file(prefix, f"the blocks have unknown type {number}", DAMAGED)
    return kind.name
