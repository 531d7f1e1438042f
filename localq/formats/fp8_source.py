"""FP8 weights as a source: e4m3 values with a scale per block, row or matrix (`formats.fp8`); read in 16 or 32 bit.

Layout (transformers, integrations/finegrained_fp8.py), for a matrix `P.weight` [..., out, in]:

    P.weight            F8_E4M3 [..., out, in]
    P.weight_scale_inv  f32, bf16 or e8m0 [..., ceil(out / block rows), ceil(in / block columns)], or one value per
                        matrix: multiplies the weights, in spite of its name
    P.activation_scale  of a static scheme for activations; not needed for weights

That of compressed-tensors (`float-quantized`) has P.weight_scale, also [out, 1], and P.input_scale in their places.

Stacks of experts, `experts.gate_up_proj`, have `experts.gate_up_proj_scale_inv`. Products in f32, rounded last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.json_files import DAMAGED

METHOD = "fp8"
SCALES_OF = ("_scale_inv", "_scale")  # behind the name of the values; both multiply
ACTIVATION = ("activation_scale", "input_scale")
STORED = torch.float8_e4m3fn
DTYPE = "float8_e4m3fn"  # the same, by its name in `Described`
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
BLOCK = (128, 128)
PIECE_WEIGHTS = 2**21  # that are in f32 at a time


class Described(Protocol):
    """A tensor in files: `formats.checkpoint.TensorInfo`."""

    @property
    def dtype(self) -> str:
        """Torch's name without "torch."."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...


class Fp8Matrix(NamedTuple):
    """A matrix, or a stack of them: the name of its scales, and the rows and columns that share one."""

    scales: str
    block: tuple[int, int]


def find(tensors: Mapping[str, Described], quantization: Mapping[str, Any], name: str) -> dict[str, Fp8Matrix]:
    """The FP8 matrices among `tensors`; name: of the model, for errors.

    Raises LocalqError (exit 8) for FP8 values without scales, and for scales of another shape or type.
    """
    block = quantization.get("weight_block_size")
    sides = tuple(block) if isinstance(block, list | tuple) else BLOCK
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise bad_file(f"{name}: config.json", f"weight_block_size has an invalid value: {str(block)[:40]}", DAMAGED)
    found = {}
    for key, info in tensors.items():
        if info.dtype != DTYPE:
            continue
        scale = next((key + each for each in SCALES_OF if key + each in tensors), "")
        scales = tensors.get(scale)
        if scales is None or f"torch.{scales.dtype}" not in map(str, SCALES):
            raise bad_file(name, f"{key[:80]!r} has FP8 values but no scales", DAMAGED)
        found[key] = Fp8Matrix(scale, _block(info.shape, scales.shape, sides, f"{name}: {key[:80]}"))
    return found


def _block(shape: tuple[int, ...], scales: tuple[int, ...], sides: tuple[int, ...], name: str) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    if len(shape) < 2:
        raise bad_file(name, f"FP8 values of shape {list(shape)} are not a matrix", DAMAGED)
    *stack, rows, columns = shape
    if scales in ((), (1,), (*stack,), (*stack, 1), (*stack, 1, 1)):
        return rows, columns
    if scales == (*stack, rows, 1):
        return 1, columns
    if scales == (*stack, -(-rows // sides[0]), -(-columns // sides[1])):
        return sides[0], sides[1]
    why = f"the scales have shape {list(scales)}, which does not match shape {list(shape)} in blocks of {list(sides)}"
    raise bad_file(name, why, DAMAGED)


def is_extra(key: str) -> bool:
    """Return whether the tensor `key` only serves FP8 values, and is not a weight itself."""
    return key.endswith(("_scale_inv", ".weight_scale")) or key.rpartition(".")[2].endswith(ACTIVATION)


def is_linear(tensors: Mapping[str, Described], key: str) -> bool:
    """Return whether FP8 values are the matrix of a Linear, which a GPU keeps as is (`formats.fp8`)."""
    return key.endswith(".weight") and len(tensors[key].shape) == 2


def idle_tensors(tensors: Mapping[str, Described], found: Mapping[str, Fp8Matrix]) -> set[str]:
    """Scales of weights and of activations that only the matrices of `found` need."""
    of_stacks = {matrix.scales for matrix in found.values()}
    activations = {f"{name}_{each}" for name in found for each in ACTIVATION}
    activations |= {f"{name.removesuffix('.weight')}.{each}" for name in found for each in ACTIVATION}
    return (of_stacks | activations) & tensors.keys()


def dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """codes e4m3 [..., out, in] times their scales -> `dtype` [..., out, in]. This is the definition of the format.

    scales   one value for all, or [..., ceil(out / rows), ceil(in / columns)] of `block`
    """
    rows, columns = codes.shape[-2:]
    grid = -(-rows // block[0]), -(-columns // block[1])
    flat, out = codes.view(-1, rows, columns), torch.empty(codes.shape, dtype=dtype, device=codes.device)
    wide = scales.float().reshape(-1, *grid) if scales.numel() > 1 else scales.float().expand(len(flat), *grid)
    for values, factors, to in zip(flat, wide, out.view(flat.shape), strict=True):
        dequantize_rows(values, factors, block, 0, to)
    return out


def dequantize_rows(codes: Tensor, scales: Tensor, block: tuple[int, int], first: int, out: Tensor) -> Tensor:
    """The same of a matrix, from row `first` on into `out` [count, in], and `out`; scales in f32."""
    step = max(1, PIECE_WEIGHTS // out.shape[1])
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        rows = slice(first + begin, first + begin + len(part))
        of_rows = scales[torch.arange(rows.start, rows.stop, device=scales.device) // block[0]]
        spread = of_rows.repeat_interleave(block[1], 1)[:, : out.shape[1]]
        part.copy_(codes[rows].float() * spread)
    return out


class Fp8Source:
    """A source of tensors whose FP8 matrices come dequantized: `read` gives bfloat16, `read_as` another type."""

    converts = True

    def __init__(self, read: Callable[[str], Tensor], close: Callable[[], None], found: dict[str, Fp8Matrix]) -> None:
        self._read, self._close, self._found = read, close, found

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU; FP8 matrices in bfloat16."""
        return self.read_as(name, torch.bfloat16) if name in self._found else self._read(name)

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor in `dtype`, contiguous, in memory of its own."""
        matrix = self._found.get(name)
        if matrix is None:
            return self._read(name).to(dtype, copy=True, memory_format=torch.contiguous_format)
        return dequantize(self._read(name), self._read(matrix.scales), matrix.block, dtype)

    def close(self) -> None:
        """Free the files."""
        self._close()
