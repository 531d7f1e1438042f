"""VPTQ, as the `vptq` package 0.0.5 stores it: vectors of neighbouring OUTPUT weights, each an entry of a codebook.

A weight matrix [out, in]. Columns are taken in the order `perm`; in that order the first `outliers` of them have a
codebook of their own, the others fall into `groups` of `group_size` columns with one codebook each:
in = outliers + groups * group_size. In every column, `vector_len` rows after each other are one vector (`vectors` =
ceil(out / vector_len)); rows from `out` on are padding, and dropped. A Linear `P` of a checkpoint has

P.centroids.weight          f [groups, count * vector_len]        main codebooks, codeword after codeword
P.res_centroids.weight      f [groups, residuals * vector_len]    residual codebooks; absent without
P.indices                   int32 [groups, vectors, words]        packed, words = ceil(group_size * bits / 32), or
                            int16 [groups, vectors, group_size]   unpacked: the bits of a u16, under any 16-bit name
P.res_indices               int16 [groups, vectors, group_size]   only where `indices` are unpacked; as these
P.outlier_centroids.weight  f [1, outlier_count * outlier_len]    absent without outliers, as the next
P.outlier_indices           int16 [1, ceil(out/outlier_len), outliers]   never packed
P.perm                      int16 (bits of a u16) or int64 [in]   place k in the order -> input column; absent: k -> k
P.weight_scale, P.weight_bias    f [in]                           the norm, of input columns; both or none

f is float16, bfloat16 or float32. Packed: each row of words is one string of bits, from the lowest bit of the first
word on; column k of the group has bits k*bits ... of it, which hold main + residual * 2^main_bits, where
bits = main_bits + residual_bits = log2(count) + log2(residuals) <= 32. Counts are powers of two there.

The weight of row r = vector_len * i + t and of the column at place k = outliers + group * group_size + j:

q[r, k]          = centroids[group, indices[group, i, j], t] + res_centroids[group, res_indices[group, i, j], t]
q[r, k]          = outlier_centroids[outlier_indices[r // outlier_len, k], r % outlier_len]         for k < outliers
weight[r, perm[k]] = q[r, k] * weight_scale[perm[k]] + weight_bias[perm[k]]

Every operation is rounded to the type of its operands, in the order written: sum, product, sum. Only the last result
is rounded to the wanted dtype. Where types differ torch promotes: main and residual and outliers to one type, then that
and the norm's. This is `vptq.ops.dequant`, the package's path in plain torch, on the tensors as they are stored, bit
for bit. Its CUDA kernels are not the definition: they fuse scale and bias into one rounding. In three points `dequant`
is not followed: it reads an int64 `perm` as if it were int16, it fails on packed rows of 16 bits and less, and it cuts
a residual index down to main_bits where residual_bits are more (the CUDA kernels do not, nor the package's writer).

(main_bits + residual_bits) / vector_len bits per weight, and codebooks: 1 MiB for 65,536 vectors of 8.

What config.json says about P (its quantization_config's `config_for_layers`, else `shared_layer_config` by the last
part of the name) gives vector lengths and counts, which the shapes above do not; `formats.vptq.read` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.files import schemes
from localq.formats.linear import SlabLinear
from localq.formats.vptq import kernel as vptq_kernel
from localq.formats.vptq.codec import FIELDS, Packed, dequantize, dequantize_rows, index_bits, sample, unpack, words_of
from localq.formats.vptq.kernel import VptqOperand
from localq.formats.vptq.read import SUFFIXES, Layer, from_checkpoint, stored_shape
from localq.kernels import gemv

__all__ = [
    "BLOCK",
    "SAMPLES_EXPERTS",
    "VARIANTS",
    "Linear",
    "Packed",
    "bytes",
    "dequantize",
    "dequantize_rows",
    "from_checkpoint",
    "is_quantized",
    "layout",
    "placed_bytes",
    "quant_method",
    "quantization_config",
    "sample",
    "stored",
    "stored_bytes",
    "stored_shape",
    "suffixes",
    "unpack",
]

quant_method = "vptq"
SAMPLES_EXPERTS = False  # each would have a codebook of 1 MiB
BLOCK = 1
TABLES = ("centroids", "res_centroids")  # flat in files
VARIANTS = ("v8-k65536-0", "v8-k65536-256", "v16-k65536-0", "v16-k65536-65536")
suffixes = tuple(SUFFIXES.values())


def bytes(out: int, columns: int, scheme: str = "v8-k65536-0") -> int:
    """Bytes of a matrix on the device with packed indices, one group, permutation and 16-bit norm, without outliers.

    scheme: "v" vector length, "-k" main centroids, "-" residual centroids (0 = none), as repositories are named.
    """
    length, count, residuals = schemes.vptq_scheme(scheme)
    bits = index_bits(count) + (index_bits(residuals) if residuals else 0)
    indices = 4 * -(-out // length) * words_of(columns, bits)
    return indices + 2 * length * (count + residuals) + 3 * 2 * columns


def is_quantized(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the checkpoint holds the Linear `prefix` in VPTQ."""
    return prefix + SUFFIXES["centroids"] in tensors


def stored_bytes(tensors: Mapping[str, Any], prefix: str) -> int:
    """Bytes of the Linear `prefix` in a checkpoint: indices, codebooks, permutation and norm."""
    return sum(tensors[prefix + suffix].nbytes for suffix in suffixes if prefix + suffix in tensors)


def placed_bytes(tensors: Mapping[str, Any], prefix: str) -> list[int]:
    """Bytes of each tensor of the Linear `prefix` on a device: as stored, but the permutation takes 16 bits."""
    held = {name: tensors[prefix + suffix] for name, suffix in SUFFIXES.items() if prefix + suffix in tensors}
    return [2 * each.shape[0] if name == "places" else each.nbytes for name, each in held.items()]


def layout(out: int, columns: int, scheme: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix -> (dtype, shape) of the tensors of a matrix [out, in] as `sample` makes it."""
    length, count, residuals = schemes.vptq_scheme(scheme)
    shapes = Layer(out, columns, length, count, residuals, 0, 0, 0, 1, columns, True).shapes()
    dtypes = {"indices": torch.int32, "places": torch.int16}
    return {SUFFIXES[name]: (dtypes.get(name, torch.float16), shape) for name, shape in shapes.items()}


def stored(packed: Packed) -> dict[str, Tensor]:
    """The checkpoint tensors of a matrix by suffix, where they lie; `from_checkpoint` reads them."""
    held = {name: tensor for name in FIELDS if (tensor := getattr(packed, name)) is not None}
    if packed.places is not None:
        order = torch.argsort(packed.places.int() & 0xFFFF)
        held["places"] = (order - (order >= 2**15) * 2**16).to(torch.int16)
    groups = packed.centroids.shape[0]
    return {SUFFIXES[name]: each.reshape(groups, -1) if name in TABLES else each for name, each in held.items()}


def quantization_config(
    compute_dtype: str, skipped: list[str], scheme: str = "", columns: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """config.json's entry of that name for matrices as `sample` makes them; columns of each Linear."""
    sizes = zip(("vector_lens", "num_centroids", "num_res_centroids"), schemes.vptq_scheme(scheme), strict=True)
    pairs = {name: [-1, size or -1] for name, size in sizes}  # [of outliers, of the rest]
    flags = dict.fromkeys(("enable_norm", "enable_perm", "is_indice_packed"), True)
    layers = {
        path: {**pairs, **flags, "outlier_size": 0, "group_num": 1, "group_size": width, "in_features": width}
        for path, width in (columns or {}).items()
    }
    return {"quant_method": quant_method, "config_for_layers": layers}


class Linear(SlabLinear):
    """y = W x + b with W in VPTQ. x [T, in] of any float dtype -> [T, out] of the same dtype.

    On a GPU `vptq_gemv` multiplies up to `gemv.ROWS` rows of x in the type of the tables where it reads the layout
    (`operand`); else slabs of rows are dequantized and multiplied by cuBLAS. On the CPU it is the reference; the loader
    replaces it there by a dequantized nn.Linear.
    """

    format = "VPTQ"
    indices: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None = None) -> None:
        super().__init__(packed.shape, bias)
        self.dtype = packed.dtype
        self.row_step = packed.vector_len
        for name in FIELDS:
            self.register_buffer(name, getattr(packed, name))

    @property
    def packed(self) -> Packed:
        """The buffers in the form of the codec."""
        return Packed(**{name: getattr(self, name) for name in FIELDS}, shape=self.shape)

    def operand(self) -> VptqOperand | None:
        """The buffers; None for layouts that the product does not read."""
        operand = self._operand
        return operand if vptq_kernel.reads(operand) else None

    @property
    def _operand(self) -> VptqOperand:
        return VptqOperand.of(self.packed, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not x.is_cuda:
            return F.linear(x, dequantize(self.packed, x.dtype), self.bias)
        operand = self.operand() if x.shape[0] <= gemv.ROWS and x.dtype == self.dtype else None
        return self._by_slabs(x) if operand is None else vptq_kernel.vptq_gemv(x, [operand])

    def dequantized_rows(self, first: int, count: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Rows of W in `dtype`. The kernel reads tables and norms of one type; torch does the rest."""
        if out is None:
            out = torch.empty(count, self.in_features, dtype=dtype, device=self.indices.device)
        if not out.is_cuda or len(self._operand.dtypes()) > 1:
            return dequantize_rows(self.packed, first, count, dtype, out)
        return self.unpack(first, out)

    def unpack(self, first: int, out: Tensor) -> Tensor:
        """Of tables and norms of one type."""
        return vptq_kernel.vptq_dequantize(self._operand, first, out)
