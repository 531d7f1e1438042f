"""Binary codes, the format of nuQmm and LUT-GEMM (Park et al., 2022): a weight is a sum of scaled signs.

A matrix [out, in], in % 8 == 0, of q = 1 to 5 planes in groups of g columns along its rows: g is 32, 64, 128, 256 or
512, and the last group of a row has what is left; or all of a row is one group. A Linear P of a checkpoint has

P.signs   u8  [out, q, in/8]             bit j of byte k is set where the sign of column 8 k + j is +, in that plane
P.alphas  f16 [out, q or q + 1, ceil(in/g)]  a scale for each plane and group; where there is one more, the last is the
                                         zero point
P.bias    dense, [out]                   where the Linear has one

weight[r, c] = sum over planes b of (+ or - alphas[r, b, c // g]) + alphas[r, q, c // g] if there is a zero point

The terms are added one by one to an f32 zero, planes in their order, and the sum is rounded once, to the wanted dtype:
every device gives the same bits. q (1 + 16 / g) bits per weight, 16 / g more with zero points. The shapes state the
scheme: g is the one of the five that gives this number of groups, or, of one group, the row. Scales are finite and of
either sign. No other project publishes this layout, so the quantization_config of config.json has `quant_method`
"localq_bcq".

Quantizing is `formats.bcq.solve`, on a text `quantize.binary`; at load codes and scales are put into the order of the
kernels (`formats.bcq.tiles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files import schemes
from localq.files.json_files import DAMAGED
from localq.formats.bcq import solve as bcq_solve
from localq.formats.bcq.codec import EIGHT, MOST_PLANES, Packed, dequantize, group_of, packed_bits
from localq.formats.bcq.linear import Linear
from localq.formats.checkpoint import Checkpoint
from localq.formats.samples import Random

__all__ = [
    "BLOCK",
    "VARIANTS",
    "Linear",
    "Maker",
    "Packed",
    "bytes",
    "dequantize",
    "from_checkpoint",
    "is_quantized",
    "layout",
    "of_scheme",
    "packed",
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
]

quant_method = "localq_bcq"
VARIANTS = ("q3g128", "q2g128", "q4g128", "q3g32", "q3g128z", "q2row")
suffixes = (".signs", ".alphas")
BLOCK = EIGHT


@dataclass(frozen=True)
class Maker:
    """The format with its numbers decided, as `convert` makes it tensor by tensor: "q3g128", "q2rowz".

    group  columns that share a scale; 0: all of a row
    """

    planes: int
    group: int
    zero_point: bool
    BLOCK: int = BLOCK

    def quantize(self, weight: Tensor) -> Packed:
        """Quantize with these numbers."""
        return quantize(weight, self.planes, self.group, self.zero_point)

    def layout(self, out: int, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Suffix -> (dtype, shape) of the tensors that `to_tensors` makes for a matrix [out, in]."""
        groups = -(-columns // (self.group or columns))
        return {
            suffixes[0]: (torch.uint8, (out, self.planes, columns // EIGHT)),
            suffixes[1]: (torch.float16, (out, self.planes + self.zero_point, groups)),
        }

    def to_tensors(self, packed: Packed, prefix: str) -> dict[str, Tensor]:
        """The checkpoint tensors of a matrix, by full name, on the CPU."""
        return to_tensors(packed, prefix)

    def quantization_config(self, compute_dtype: str, skipped: list[str]) -> dict[str, Any]:
        """config.json's entry of that name."""
        return quantization_config(compute_dtype, skipped)


def of_scheme(scheme: str) -> Maker:
    """ "q3g128" for 3 planes in groups of 128, "row" instead of "g128" for one group a row, "z" behind for zero points;
    "" is "q3g128". Raises LocalqError (exit 2)."""
    planes, group, zero_point = schemes.bcq_scheme(scheme)
    return Maker(planes, group, zero_point)


def quantize(
    weight: Tensor, planes: int = 3, group: int = 128, zero_point: bool = False, turns: int = bcq_solve.TURNS
) -> Packed:
    """weight f32 | bf16 | f16 [out, in], in % 8 == 0 -> Packed on its device; group 0: all of a row.

    By what the matrix alone tells; on a text `quantize/binary/matrix.py` makes a better one. Raises LocalqError for a
    shape that the format cannot take and for weights that are not finite.
    """
    if weight.dim() != 2 or weight.shape[1] % EIGHT or not weight.numel():
        raise bad_file(
            "weight", f"bcq requires a column count divisible by {EIGHT}; this matrix has shape {list(weight.shape)}"
        )
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise bad_file("weight", f"bcq supports 16-bit and 32-bit floats, not {weight.dtype}")
    if not bool(torch.isfinite(weight).all()):
        raise bad_file("weight", "the weights contain NaN or infinity")
    columns = weight.shape[1]
    size = min(group or columns, columns)
    whole = columns // size * size
    parts = [_solved(weight[:, :whole], size, planes, zero_point, turns)]
    if whole < columns:
        parts.append(_solved(weight[:, whole:], columns - whole, planes, zero_point, turns))
    numbers, scales = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return packed(numbers, scales.transpose(1, 2), planes)


def packed(numbers: Tensor, scales: Tensor, planes: int) -> Packed:
    """numbers u8 [out, in], of which bit b is the sign in plane b, and scales f16 [out, layers, groups] -> Packed."""
    signs = torch.stack([packed_bits((numbers >> plane & 1).bool()) for plane in range(planes)], 1)
    return Packed(signs, scales.contiguous())


def _solved(weight: Tensor, size: int, planes: int, zero_point: bool, turns: int) -> tuple[Tensor, Tensor]:
    """Numbers u8 [out, columns] and scales f16 [out, groups, layers] of columns in whole groups."""
    out, columns = weight.shape
    numbers, scales = bcq_solve.solve(weight.reshape(-1, size).float(), planes, zero_point, turns=turns)
    return numbers.view(out, columns), scales.view(out, columns // size, -1)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in `scheme`: random signs, planes of about one scale."""
    (out, columns), random = shape, Random(seed, device)
    planes, group, zero_point = schemes.bcq_scheme(scheme)
    signs = random.codes(out, planes, columns // EIGHT)
    scales = random.scales((columns * planes) ** -0.5, out, planes + zero_point, -(-columns // (group or columns)))
    if zero_point:  # of either sign, so that they do not add up along a row
        scales[:, -1] = random.normal(out, scales.shape[2], deviation=0.1 * columns**-0.5)
    return Packed(signs, scales)


def bytes(out: int, columns: int, planes: int = 3, group: int = 128, zero_point: bool = False) -> int:
    """Bytes of a matrix on the device: codes and scales."""
    return out * planes * columns // EIGHT + 2 * out * (planes + zero_point) * -(-columns // (group or columns))


# ---- checkpoints


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in binary codes. vq2 has its own signs, and no alphas."""
    return all(prefix + suffix in tensors for suffix in suffixes)


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of codes and of scales, there and on the device."""
    return [tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors]


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    return sum(placed_bytes(tensors, prefix))


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors that `to_tensors` makes for a matrix [out, in]."""
    return of_scheme(scheme).layout(out, columns)


def to_tensors(packed: Packed, prefix: str) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix, by full name, on the CPU; `from_checkpoint` reads them."""
    return {prefix + suffix: tensor.cpu() for suffix, tensor in stored(packed).items()}


def stored(packed: Packed) -> dict[str, Tensor]:
    """The same by suffix, where they lie."""
    return {suffixes[0]: packed.codes, suffixes[1]: packed.scales}


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name. `skipped` are the Linear modules that stay unquantized."""
    return {"quant_method": quant_method, "compute_dtype": compute_dtype, "modules_to_not_convert": skipped}


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by its headers; raises LocalqError (exit 8) where they do not fit together."""
    signs, alphas = (checkpoint.tensors[prefix + suffix] for suffix in suffixes)
    shape, scales = tuple(signs.shape), tuple(alphas.shape)
    fits = len(shape) == len(scales) == 3 and all(shape) and all(scales) and scales[0] == shape[0]
    fits = fits and shape[1] <= MOST_PLANES and scales[1] - shape[1] in (0, 1)
    fits = fits and group_of(EIGHT * shape[2], scales[2]) > 0
    if not fits or signs.dtype != "uint8" or alphas.dtype != "float16":
        found = f"signs are {signs.dtype} {list(shape)} and alphas {alphas.dtype} {list(scales)}"
        raise bad_file(prefix, f"damaged binary codes: {found[:120]}", DAMAGED)
    return shape[0], EIGHT * shape[2]


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    stored_shape(checkpoint, prefix)
    signs, alphas = (checkpoint.read(prefix + suffix) for suffix in suffixes)
    if not bool(torch.isfinite(alphas).all()):
        raise bad_file(prefix, "damaged binary codes: the alphas contain NaN or infinity", DAMAGED)
    return Packed(signs, alphas)
