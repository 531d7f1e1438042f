"""FP8: values in e4m3 with a scale per block, row or matrix; read and not made here.

A weight matrix [out, in]. A Linear `P` of a checkpoint has

P.weight            e4m3 [out, in]    float8_e4m3fn: no infinities
P.weight_scale_inv  f                 [ceil(out / rows), ceil(in / columns)] for blocks of rows x columns, or one value
P.weight_scale      f                 the same by another name; also [out, 1]

f is f32, bf16, f16 or e8m0. The first name is that of transformers (`quant_method` "fp8", `weight_block_size` [128,
128], and Mistral's, one value), the second that of compressed-tensors (`float-quantized`, `block_structure`) and of
ModelOpt (FP8). Both multiply:

weight[r, k] = value[r, k] * scale[r // rows, k // columns]   in f32, rounded last

Bit for bit transformers' `Fp8Dequantize` and, in bf16, compressed-tensors. NaN among values or scales is refused as
damaged. 8 bits per weight and the scales. Quantization of activations (`activation_scale`, `input_scale`) is not
applied: they stay in 16 bit.

On a GPU a matrix stays as it is, with a scale for each row, or for 16 rows and 64 columns, the tiles of the kernel:
`codec.refine` repeats those of larger blocks, which takes 0.03 bits per weight. On a CPU, and for `localq quantize`,
`formats.fp8_source` gives 16-bit weights. It does the same for stacks of experts in one tensor, even on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.json_files import DAMAGED
from localq.formats import fp8_source as source
from localq.formats.checkpoint import Checkpoint
from localq.formats.fp8 import codec
from localq.formats.fp8.codec import NOT_A_NUMBER, Packed, dequantize, dequantize_rows, refine
from localq.formats.scaled import kernel as scaled_kernel
from localq.formats.scaled.linear import ScaledLinear, ScaledParts

__all__ = ["BLOCK", "VARIANTS", "Linear", "Packed", "bytes", "dequantize", "fits", "from_checkpoint", "is_quantized",
           "layout", "placed_bytes", "quant_method", "quantization_config", "sample", "stored", "stored_bytes",
           "stored_shape", "suffixes"]  # fmt: skip

quant_method = source.METHOD
BLOCK = 128  # columns are a multiple of it in what `sample` makes
VARIANTS = ("", "rows")  # a scale for each block of 128 x 128, which the kernel has in blocks of its own; for each row
TILE_BLOCK = (scaled_kernel.ROWS, scaled_kernel.KINDS["fp8 blocks"].columns)
WEIGHT = ".weight"
suffixes = (WEIGHT, *(WEIGHT + each for each in source.SCALES_OF), *("." + each for each in source.ACTIVATION))


class Linear(ScaledLinear):
    """y = W x + b with W in FP8."""

    format = "FP8"

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        self.block, by_row = packed.block, packed.block == (1, packed.shape[1])
        kind = "fp8 rows" if by_row else "fp8 blocks" if packed.block == TILE_BLOCK else ""
        scales, factors = (None, packed.scales.view(-1)) if by_row else (packed.scales, None)
        super().__init__(packed.shape, kind, ScaledParts(packed.codes, scales, None, factors), bias)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec; copies where they are tiled."""
        return self._packed(self.row_major)

    def defined_rows(self, parts: ScaledParts, first: int, out: Tensor) -> Tensor:
        """Called by `ScaledLinear`."""
        return dequantize_rows(self._packed(parts), first, out)

    def _packed(self, parts: ScaledParts) -> Packed:
        if parts.scales is not None:
            return Packed(parts.codes, parts.scales, self.block)
        assert parts.factors is not None
        return Packed(parts.codes, parts.factors.view(-1, 1), self.block)


def bytes(out: int, columns: int, scheme: str = "") -> int:
    """Bytes of a matrix on the device: codes and scales."""
    return scaled_kernel.KINDS["fp8 rows" if scheme == "rows" else "fp8 blocks"].bytes(out, columns)


def fits(out: int, columns: int, scheme: str) -> bool:
    """Return whether the kernels read a matrix [out, in]: whole tiles of whole blocks."""
    return scaled_kernel.fits("fp8 rows" if scheme == "rows" else "fp8 blocks", out, columns)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain: with a scale for each block of the kernel, or for each row."""
    return codec.sample(shape, seed, device, (1, 0) if scheme == "rows" else TILE_BLOCK)


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the Linear `prefix` is stored in FP8. `fp8_source` hides FP8 where it dequantizes."""
    found = tensors.get(prefix + WEIGHT)
    return found is not None and found.dtype == source.DTYPE and len(found.shape) == 2


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: codes and scales."""
    codes, scales = tensors[prefix + WEIGHT], tensors[prefix + (_scale(tensors, prefix) or WEIGHT)]
    grid = _grid(tuple(codes.shape), tuple(scales.shape))
    return [codes.nbytes, 4 * grid[0] * grid[1]]


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    return sum(tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors)


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by its headers; LocalqError (exit 8) where they are unsound."""
    _matrix(checkpoint, prefix)
    out, columns = checkpoint.tensors[prefix + WEIGHT].shape
    return out, columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    matrix = _matrix(checkpoint, prefix)
    codes = checkpoint.read(prefix + WEIGHT).contiguous().view(torch.uint8)
    scales = checkpoint.read(matrix.scales).float()
    if not bool(torch.isfinite(scales).all()):
        raise bad_file(prefix, "damaged FP8 weights: the scales contain NaN or infinity", DAMAGED)
    signed = codes.view(torch.int8)
    if int(codes.max()) == NOT_A_NUMBER | 0x80 or int(signed.max()) == NOT_A_NUMBER:
        raise bad_file(prefix, "damaged FP8 weights: the values contain NaN", DAMAGED)
    out, columns = codes.shape
    if matrix.block[1] == columns and matrix.block[0] in (1, out):
        return Packed(codes, scales.reshape(-1, 1).expand(out, 1).contiguous(), (1, columns))
    packed = Packed(codes, scales.contiguous(), matrix.block)
    is_tiled = _grid((out, columns), tuple(scales.shape)) != tuple(scales.shape)
    return refine(packed, TILE_BLOCK) if is_tiled else packed


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in], in blocks of `TILE_BLOCK`."""
    grid = (out, 1) if scheme == "rows" else (-(-out // TILE_BLOCK[0]), -(-columns // TILE_BLOCK[1]))
    name = WEIGHT + source.SCALES_OF[scheme == "rows"]
    return {WEIGHT: (source.STORED, (out, columns)), name: (torch.float32, grid)}


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie."""
    return {WEIGHT: packed.codes.view(source.STORED), WEIGHT + source.SCALES_OF[packed.block[0] == 1]: packed.scales}


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The entry `quantization_config` of config.json. `skipped`: the Linear modules that stay unquantized."""
    stated = {"quant_method": quant_method, "activation_scheme": "dynamic", "modules_to_not_convert": skipped}
    return {**stated, "weight_block_size": list(TILE_BLOCK)}


def _scale(tensors: Mapping[str, Any], prefix: str) -> str | None:
    """The suffix of its scales."""
    return next((WEIGHT + each for each in source.SCALES_OF if prefix + WEIGHT + each in tensors), None)


def _matrix(checkpoint: Checkpoint, prefix: str) -> source.Fp8Matrix:
    """Its scales and blocks, checked; LocalqError (exit 8) where they are unsound."""
    names = (prefix + suffix for suffix in suffixes)
    own = {name: checkpoint.tensors[name] for name in names if name in checkpoint.tensors}
    matrix = source.find(own, checkpoint.quantization, prefix)[prefix + WEIGHT]
    shape, scales = checkpoint.tensors[prefix + WEIGHT].shape, checkpoint.tensors[matrix.scales].shape
    refined = tuple(scales) != _grid(tuple(shape), tuple(scales)) and matrix.block not in ((1, shape[1]), tuple(shape))
    if refined and (matrix.block[0] % TILE_BLOCK[0] or matrix.block[1] % TILE_BLOCK[1]):
        raise bad_file(prefix, f"FP8 in blocks of {list(matrix.block)} is not supported", "Use another repository.")
    return matrix


def _grid(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """[rows, columns] of the scales on a device: by row, or in blocks of the tiles; else as stored."""
    out, columns = shape
    numbers = scales if len(scales) == 2 else (1, 1)
    if numbers[1] == 1 and numbers[0] in (1, out):
        return out, 1
    tiles = out // TILE_BLOCK[0], columns // TILE_BLOCK[1]
    coarser = numbers[0] <= tiles[0] and numbers[1] <= tiles[1]
    return tiles if coarser and scaled_kernel.fits("fp8 blocks", out, columns) else (numbers[0], numbers[1])
