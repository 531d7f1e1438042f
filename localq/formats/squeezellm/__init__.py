"""SqueezeLLM in 4 bits, dense: every row of a matrix has 16 values of its own, and a weight is the number of one.

A weight matrix [out, in], in a multiple of 8. A Linear `P` of a checkpoint has

P.qweight       int32 [in / 8, out]   bits 4i ... 4i + 3 of word [j, r]: the code of column 8j + i of row r
P.lookup_table  f     [out, 16]       what codes of a row stand for, in any order; float16 as a rule. float32 and
                                      bfloat16 are read too, rounded to float16 (vLLM computes in that)

weight[r, k] = lookup_table[r, code[r, k]] in float16, rounded once to the wanted dtype

This is `QuantLinearLUT` of SqueezeLLM (arXiv 2306.07629, squeezellm/quant.py) with `bits` 4, and what vLLM read as
"squeezellm". Its sparse part (P.rows, P.cols, P.vals, P.full_rows), which holds outliers beside it, and its 3 bits are
refused by name. In config.json's quantization_config, `quant_method` is "squeezellm" and `wbits` 4.
4 + 256 / in bits per weight: 4.06 at 4096 columns, 4.44 at 576.

In memory: codes u8 [out, in / 2], byte j of a row has column 2j in the low nibble and 2j + 1 in the high one; table f16
[out, 16]. The kernels (`formats.squeezellm.kernel`) read them so, or faster in tiles, into which they are put at load
(`formats.squeezellm.tiles`).

Quantizing: the values of a row are those that lose least of sum over k of importance[k] * (weight - value)^2, and each
weight takes the nearest. importance is what calibration found as the mean square of input k (the diagonal of the
metric that the product's error has; SqueezeLLM takes squared gradients of every weight in its place), or ones. It is
`formats.squeezellm.fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import bad_file
from localq.files.json_files import DAMAGED
from localq.formats.checkpoint import Checkpoint
from localq.formats.int4.codec import bytes_of, nibbles
from localq.formats.linear import SlabLinear
from localq.formats.samples import Random
from localq.formats.squeezellm import kernel as squeezellm_kernel
from localq.formats.squeezellm import tiles as squeezellm_tiles
from localq.formats.squeezellm.fit import VALUES, fitted
from localq.formats.squeezellm.kernel import RowLutOperand
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES

BLOCK = 32  # rows are made whose columns are a multiple of it: those that the kernel multiplies
WORD = 8  # codes of an int32
# Weights that are looked up together; their numbers take 8 bytes each.
CHUNK_WEIGHTS = {"cpu": 2**20, "cuda": 2**22}
FITTED_ROWS = 256  # that are fitted together; the losses of runs of each take some 100 KiB
FLOATS = ("float16", "bfloat16", "float32")
SPARSE = (".rows", ".cols", ".vals", ".full_rows")
quant_method = "squeezellm"
VARIANTS = ("",)
suffixes = (".qweight", ".lookup_table")


@dataclass(frozen=True)
class Packed:
    """One matrix: codes u8 [out, in / 2], table f16 [out, 16]; see the module."""

    codes: Tensor
    table: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]"""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.codes.nbytes + self.table.nbytes

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return Packed(self.codes.to(device), self.table.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`: both tensors where `place` copies them."""
        return Packed(place(self.codes), place(self.table))


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    return dequantize_rows(packed, 0, torch.empty(packed.shape, dtype=dtype, device=packed.codes.device))


def dequantize_rows(packed: Packed, first: int, out: Tensor, tiled: bool = False) -> Tensor:
    """Rows of the matrix from `first` on into `out` [count, in], and `out`. `tiled`: the codes of `packed` are."""
    step = max(CHUNK_WEIGHTS.get(out.device.type, 2**20) // out.shape[1], 1)
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        rows = slice(first + begin, first + begin + len(part))
        codes = squeezellm_tiles.untile(packed.codes, rows.start, len(part)) if tiled else packed.codes[rows]
        part.copy_(torch.gather(packed.table[rows], 1, nibbles(codes).long()))
    return out


def quantize(weight: Tensor, importance: Tensor | None = None) -> Packed:
    """weight f32 | bf16 | f16 [out, in] -> Packed on its device; in % 32 == 0.

    importance   of the columns, f32 [in], none negative; None: all the same
    Raises LocalqError for a shape that this format cannot take and for weights that are not finite or beyond float16.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK or not weight.numel():
        why = f"{quant_method} requires a column count divisible by {BLOCK}; this matrix has shape {list(weight.shape)}"
        raise bad_file("weight", why)
    if not bool((weight.abs() <= torch.finfo(torch.float16).max).all()):
        raise bad_file("weight", "the weights contain NaN, infinity or values outside the range of float16")
    out, columns = weight.shape
    packed = Packed(
        torch.empty(out, columns // 2, dtype=torch.uint8, device=weight.device),
        torch.empty(out, VALUES, dtype=torch.float16, device=weight.device),
    )
    for first in range(0, out, FITTED_ROWS):
        rows = slice(first, first + FITTED_ROWS)
        packed.table[rows], codes = fitted(weight[rows].float(), importance)
        packed.codes[rows] = bytes_of(codes)
    return packed


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain: every code, equally often; normal values."""
    (out, columns), random = shape, Random(seed, device)
    return Packed(random.codes(out, columns // 2), random.normal(out, VALUES, deviation=columns**-0.5))


def bytes(out: int, columns: int) -> int:
    """Bytes of a matrix on the device: codes and tables."""
    return out * columns // 2 + 2 * VALUES * out


# ---- checkpoints


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the Linear `prefix` is stored in this format. AWQ and GPTQ have scales, and no lookup table."""
    return prefix + suffixes[0] in tensors and prefix + suffixes[1] in tensors


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint."""
    return sum(tensors[prefix + suffix].nbytes for suffix in suffixes)


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of codes and of tables on a device, where those are float16."""
    codes, table = (tensors[prefix + suffix] for suffix in suffixes)
    return [codes.nbytes, 2 * VALUES * codes.shape[-1] if len(codes.shape) == 2 else table.nbytes]


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors that `to_tensors` makes for a matrix [out, in]."""
    return {suffixes[0]: (torch.int32, (columns // WORD, out)), suffixes[1]: (torch.float16, (out, VALUES))}


def to_tensors(packed: Packed, prefix: str) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix, by full name, on the CPU; `from_checkpoint` reads them."""
    return {prefix + suffix: tensor.cpu() for suffix, tensor in stored(packed).items()}


def stored(packed: Packed) -> dict[str, Tensor]:
    """The same by suffix, where they lie."""
    return {suffixes[0]: packed.codes.view(torch.int32).T.contiguous(), suffixes[1]: packed.table}


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name, with vLLM's key for the bits. `skipped` are the modules left unquantized."""
    return {"quant_method": quant_method, "wbits": 4, "modules_to_not_convert": skipped}


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by headers and config.json; LocalqError (exit 8) where they are unsound."""
    tensors, said = checkpoint.tensors, checkpoint.quantization.get("wbits", 4)
    _require(prefix, type(said) is int and said == 4, f"wbits is {repr(said)[:20]}; only 4 is supported")
    sparse = [suffix for suffix in SPARSE if prefix + suffix in tensors]
    _require(prefix, not sparse, f"the sparse part ({', '.join(sparse)}) is not supported")
    for suffix in suffixes:
        _require(prefix, prefix + suffix in tensors, f"the checkpoint lacks {suffix[1:]}")
    words, table = (tensors[prefix + suffix] for suffix in suffixes)
    sound = words.dtype == "int32" and len(words.shape) == 2 and min(words.shape) > 0
    _require(prefix, sound, f"qweight is {words.dtype} {list(words.shape)[:4]}; expected int32 with two dimensions")
    out, columns = words.shape[1], WORD * words.shape[0]
    fits = table.dtype in FLOATS and tuple(table.shape) == (out, VALUES)
    _require(prefix, fits, f"lookup_table is {table.dtype} {list(table.shape)[:4]}; expected floats {[out, VALUES]}")
    return out, columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    stored_shape(checkpoint, prefix)
    table = checkpoint.read(prefix + suffixes[1]).to(torch.float16)
    sound = bool(torch.isfinite(table).all())
    _require(prefix, sound, "lookup_table contains NaN, infinity or values outside the range of float16")
    words = checkpoint.read(prefix + suffixes[0])
    return Packed(words.T.contiguous().view(torch.uint8), table)


def _require(prefix: str, holds: bool, why: str) -> None:
    if not holds:
        raise bad_file(prefix, f"unreadable SqueezeLLM weights: {why}", DAMAGED)


# ---- the module


class Linear(SlabLinear):
    """y = W x + b with W in this format. x [T, in] of any float dtype -> [T, out] of the same dtype.

    On a GPU, up to 8 rows of 16 bit are multiplied with the codes where in % 32 == 0 and a row fits into shared memory;
    for all others slabs of W are dequantized. On the CPU the loader replaces it by a dequantized nn.Linear.

    tiled    the codes are in the order that the kernels read best (`tile_`); `packed` always has them row by row
    """

    format = "SqueezeLLM"
    codes: Tensor
    table: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.tiled = False
        self.register_buffer("codes", packed.codes)
        self.register_buffer("table", packed.table)

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec, row by row; a copy of the codes where they are tiled."""
        return Packed(squeezellm_tiles.untile(self.codes) if self.tiled else self.codes, self.table)

    def operand(self) -> RowLutOperand | None:
        """The buffers, where their columns are whole loads of the product."""
        return None if self.in_features % squeezellm_kernel.COLUMNS else self._operand

    @property
    def _operand(self) -> RowLutOperand:
        return RowLutOperand(self.codes, self.table, self.tiled, bias=self.bias)

    def tile_(self) -> Linear:
        """Put the codes into tiles, in place, where rows and columns allow it."""
        if not self.tiled and squeezellm_tiles.fits(*self.shape):
            squeezellm_tiles.tile_(self.codes)
            self.tiled = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        operand = self.operand() if x.shape[0] <= gemv.ROWS and x.dtype in HALF_TYPES else None
        return self._by_slabs(x) if operand is None else squeezellm_kernel.rowlut_gemv(x, [operand])

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.codes.device)
        if not out.is_cuda:
            return dequantize_rows(Packed(self.codes, self.table), first, out, self.tiled)
        return self.unpack(first, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Every layout."""
        return squeezellm_kernel.rowlut_dequantize(self._operand, first, out)
