"""The arithmetic of NF4: quantize and dequantize. The format is specified in `formats.nf4`, which others import.

Works on whatever device the tensors are on; rows are worked on in chunks that bound the temporaries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import bad_file
from localq.formats.samples import Random

BLOCK = 64
NESTED_BLOCK = 256
CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}  # temporaries that stay in a CPU's cache; 32 MiB each on a GPU

# The NF4 values: quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, arXiv 2305.14314, appendix E).
CODE_MAP = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=torch.float32,
)  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """One quantized matrix; the fields are those of the module's docstring, None without double quantization."""

    codes: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    nested_map: Tensor | None
    offset: Tensor | None
    shape: tuple[int, int]
    dtype: torch.dtype  # of the matrix that was quantized

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        tensors = (self.codes, self.absmax, self.nested_absmax, self.nested_map, self.offset)
        moved = [None if tensor is None else tensor.to(device) for tensor in tensors]
        assert moved[0] is not None  # for the type checker: codes and absmax are never None
        assert moved[1] is not None
        return Packed(moved[0], moved[1], moved[2], moved[3], moved[4], self.shape, self.dtype)

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`: every tensor where `place` copies it, but for the map, which matrices share."""
        tensors = (self.codes, self.absmax, self.nested_absmax, self.offset)
        codes, absmax, nested_absmax, offset = (None if each is None else place(each) for each in tensors)
        assert codes is not None  # as in `to`
        assert absmax is not None
        nested_map = None if self.nested_map is None else self.nested_map.to(device)
        return Packed(codes, absmax, nested_absmax, nested_map, offset, self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.codes, self.absmax, self.nested_absmax, self.nested_map, self.offset)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@functools.cache
def dynamic_map() -> Tensor:
    """The signed 8-bit map of the nested scales, f32 [256], ascending ("dynamic tree quantization", arXiv 2110.02861).

    Seven decades 10^-6 ... 10^0; decade e holds 2^e values, the midpoints of equal steps from 0.1 to 1, of both signs;
    then 0 and 1. The arithmetic is fp32 throughout, in the order that bitsandbytes uses, so that every bit agrees.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0
        scale = 10 ** (decade - 6)
        values += (scale * middles).tolist()
        values += (-scale * middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


# ---- quantize


def quantize(weight: Tensor, device: torch.device | None = None) -> Packed:
    """weight f32 | bf16 | f16 [out, in], in % 64 == 0 -> Packed on its device, or on `device`, double-quantized.

    On another device only some rows of the weight are there at a time.
    Raises LocalqError for a shape that NF4 cannot take and for weights that are not finite.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK or not weight.numel():
        raise bad_file(
            "weight", f"NF4 requires a column count divisible by {BLOCK}; this matrix has shape {list(weight.shape)}"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise bad_file("weight", f"NF4 supports 16-bit and 32-bit floats, not {weight.dtype}")
    out, columns = weight.shape
    device = device or weight.device
    codes = torch.empty(out, columns // 2, dtype=torch.uint8, device=device)
    absmax = torch.empty(out, columns // BLOCK, dtype=torch.float32, device=device)
    bounds = _midpoints(CODE_MAP.to(device))
    for part in _row_chunks((out, columns), device):
        _quantize_rows(weight[part].to(device).float(), bounds, codes[part], absmax[part])
    absmax = absmax.reshape(-1)
    if not torch.isfinite(absmax).all():
        raise bad_file("weight", "the weights contain NaN or infinity")
    offset = absmax.mean()
    nested_codes, nested_absmax = _quantize_absmax(absmax - offset)
    nested_map = dynamic_map().to(device)
    return Packed(codes, nested_codes, nested_absmax, nested_map, offset, (out, columns), weight.dtype)


def _row_chunks(shape: tuple[int, int], device: torch.device) -> Iterator[slice]:
    """Slices of rows, each of about `CHUNK_ELEMENTS` of that kind of device."""
    out, columns = shape
    rows = max(1, CHUNK_ELEMENTS.get(device.type, 2**18) // columns)
    return (slice(first, first + rows) for first in range(0, out, rows))


def _midpoints(values: Tensor) -> Tensor:
    return (values[:-1] + values[1:]) / 2


def _quantize_rows(weight: Tensor, bounds: Tensor, codes: Tensor, absmax: Tensor) -> None:
    """weight f32 [rows, in], bounds f32 [15] -> codes u8 [rows, in/2], absmax f32 [rows, in/64], written in place."""
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    torch.amax(blocks.abs(), dim=-1, out=absmax)
    scaled = blocks * _reciprocal(absmax).unsqueeze(-1)
    nearest = torch.zeros(blocks.shape, dtype=torch.uint8, device=weight.device)
    for bound in bounds:  # the code is the number of bounds below; 1.6 times as fast as torch.bucketize on a CPU
        nearest += scaled > bound
    nearest = nearest.reshape(weight.shape)
    torch.bitwise_or(nearest[:, 0::2] << 4, nearest[:, 1::2], out=codes)


def _reciprocal(absmax: Tensor) -> Tensor:
    """1 / absmax in fp32, finite for an all-zero block (whose weights then scale to 0)."""
    return 1.0 / absmax.clamp(min=1e-38)


def _quantize_absmax(centred: Tensor) -> tuple[Tensor, Tensor]:
    """centred f32 [blocks] (absmax minus its mean) -> codes u8 [blocks], scales f32 [ceil(blocks / 256)]."""
    count = centred.numel()
    groups = F.pad(centred, (0, -count % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    scales = groups.abs().amax(dim=-1)
    scaled = (groups * _reciprocal(scales).unsqueeze(-1)).reshape(-1)[:count].contiguous()
    bounds = _midpoints(dynamic_map().to(centred.device))
    codes = torch.bucketize(scaled, bounds, out_int32=True)  # a tie goes to the lower entry
    tie = scaled == bounds[codes.clamp(max=len(bounds) - 1).long()]
    return (codes + (tie & (codes % 2 == 1))).to(torch.uint8), scales  # and from an odd one to the even one above


def unit_absmax(columns: int) -> float:
    """The absmax at which a row of uniformly random codes has unit gain."""
    return 1 / (math.sqrt(columns) * float(CODE_MAP.square().mean().sqrt()))


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain: every code, equally often; double-quantized."""
    (out, columns), random = shape, Random(seed, device)
    blocks, unit = out * columns // BLOCK, unit_absmax(shape[1])
    nested = random.scales(0.4 * unit, math.ceil(blocks / NESTED_BLOCK), dtype=torch.float32, spread=0.5)
    codes, absmax = random.codes(out, columns // 2), random.codes(blocks)  # of a map that spans -1 to 1
    tables = (dynamic_map().to(device), torch.tensor(unit, device=device))
    return Packed(codes, absmax, nested, *tables, shape, torch.float16)


def join(shape: tuple[int, int], parts: Iterable[tuple[slice, Packed]]) -> Packed:
    """One matrix [out, in] of parts, each with its rows, on the CPU.

    Each part has its own mean of scales, and one matrix has only one: the scales are decoded to f32, 4.5 bits per
    weight, with bit-identical weights.
    """
    out, columns = shape
    codes = torch.empty(out, columns // 2, dtype=torch.uint8)
    scales, dtype = torch.empty(out, columns // BLOCK), torch.bfloat16
    for rows, packed in parts:
        codes[rows], scales[rows], dtype = packed.codes, absmax_f32(packed), packed.dtype
    return Packed(codes, scales.view(-1), None, None, None, shape, dtype)


def joined_bytes(weights: int) -> list[int]:
    """Bytes of each tensor of such a matrix: codes and scales in f32."""
    return [weights // 2, 4 * weights // BLOCK]


# ---- dequantize


def absmax_f32(packed: Packed) -> Tensor:
    """The scales as they act: f32 [out, in/64]."""
    absmax = packed.absmax
    if packed.nested_absmax is not None:
        assert packed.nested_map is not None  # for the type checker: the three come together
        assert packed.offset is not None
        scales = packed.nested_absmax.repeat_interleave(NESTED_BLOCK)[: absmax.numel()]
        absmax = packed.nested_map[absmax.long()] * scales
        absmax += packed.offset
    return absmax.reshape(packed.shape[0], -1)


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on the device of `packed`. This is the definition."""
    out, columns = packed.shape
    absmax = absmax_f32(packed)
    code_map = CODE_MAP.to(packed.codes.device)
    weight = torch.empty(out, columns, dtype=dtype, device=packed.codes.device)
    for part in _row_chunks((out, columns), weight.device):
        codes = packed.codes[part]
        pairs = torch.stack((codes >> 4, codes & 15), dim=-1)  # [rows, in/2, 2]: even column, odd column
        values = code_map[pairs.int()].reshape(-1, columns // BLOCK, BLOCK)
        weight[part] = (values * absmax[part].unsqueeze(-1)).reshape(-1, columns)
    return weight
