"""VPTQ on a GPU: products of few rows, and plain weights for prefill. Checks, then the kernels on torch's stream.

They work under CUDA graph capture and allocate nothing but their result. Codebooks, norm and x are of one 16-bit type;
codewords are gathered from L2. Bit for bit what `formats.vptq.codec` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from localq import kernels
from localq.formats.codebooks.gather_kernel import SECTOR
from localq.formats.vptq.codec import WORD, Packed
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, TYPES, addresses, check, check_cuda, place, slab_arguments
from localq.kernels.operand import Operand

VECTORS = (8, 16)  # rows of a codeword
COLUMNS = 2**16


@dataclass(frozen=True)
class VptqOperand(Packed, Operand):
    """A matrix [out, in] in VPTQ, with the tensors of the format as they are stored."""

    @classmethod
    def of(cls, packed: Packed, bias: Tensor | None = None) -> VptqOperand:
        """The same tensors."""
        return cls(**{each.name: getattr(packed, each.name) for each in fields(Packed)}, bias=bias)

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.shape[1]

    @property
    def words(self) -> int:
        """Words of a row of packed indices; 0 where they are unpacked."""
        return self.indices.shape[2] if self.indices.dtype == torch.int32 else 0

    @property
    def residuals(self) -> int:
        """Entries of a residual codebook, 0 without one."""
        return 0 if self.res_centroids is None else self.res_centroids.shape[1]

    @property
    def gathered_bytes(self) -> int:
        """A sector for each index of each table."""
        return vptq_gemv_sectors(self)

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has vectors, codebooks and indices of one size, and one type."""
        return self.centroids.shape, self.centroids.dtype, self.residuals, self.words

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`vptq_gemv`."""
        return vptq_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, beside x of the type of the codebooks."""
        return self.indices.is_cuda and self.centroids.dtype == dtype

    def dtypes(self) -> set[torch.dtype]:
        """The types of tables and norm; the kernels take one."""
        floats = (self.centroids, self.res_centroids, self.outlier_centroids, self.weight_scale, self.weight_bias)
        return {each.dtype for each in floats if each is not None}


def reads(matrix: VptqOperand) -> bool:
    """Return whether `vptq_gemv` reads a matrix of this layout."""
    groups, _, length = matrix.centroids.shape
    columns = matrix.shape[1]
    plain = groups == 1 and length in VECTORS and not matrix.outliers and columns % 8 == 0 and columns <= COLUMNS
    return plain and len(matrix.dtypes()) == 1 and matrix.centroids.dtype in HALF_TYPES


def vptq_gemv(
    x: Tensor,
    operands: Sequence[VptqOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows, as `gather_gemv`; vectors of 8 or 16, one group.

    `operands` have vectors, codebooks and indices of one size, and no outliers; each has its own permutation and norm.
    W is rounded as the definition of the format says; products are added in f32.
    """
    op = "vptq_gemv"
    gemv.check_x(op, x, [matrix.indices for matrix in operands])
    for matrix in operands:
        gemv.check_columns(op, x, matrix.shape[1])
        if not reads(matrix):
            raise ValueError(f"{op}: a matrix has groups, vectors, columns, outliers or types that it does not read")
        check_vptq(op, matrix, (x.dtype,))
    out, arguments = gemv.prepare(op, x, operands, norm, residual, activation, out)
    check_cuda(op, "indices", operands[0].indices)
    kernels.module().vptq_gemv(matrices=[vptq_arguments(each) for each in operands], **arguments, **place(x))
    return out


def vptq_gemv_bytes(rows: int, matrix: VptqOperand) -> int:
    """As `gather_gemv_bytes`."""
    size = matrix.centroids.element_size()
    return matrix.nbytes + size * rows * sum(matrix.shape)


def vptq_gemv_sectors(matrix: VptqOperand) -> int:
    """As `gather_gemv_sectors`: one for each index of each table."""
    count, length = matrix.centroids.shape[1:]
    tables = 1 + bool(matrix.residuals)
    return SECTOR * tables * -(-matrix.shape[0] // length) * matrix.shape[1] if count else 0


def vptq_dequantize(matrix: VptqOperand, first: int, out: Tensor) -> Tensor:
    """Rows of a matrix from `first` on, a multiple of the vector length, into `out` [count, in], and `out`.

    Tables and norm are of one type, f16, bf16 or f32, and so is `out`. Bound by the gather of codewords from L2.
    Raises ValueError by the argument's name.
    """
    op = "vptq_dequantize"
    check_vptq(op, matrix, tuple(TYPES))
    rows, length = out.shape[0], matrix.centroids.shape[2]
    if first % length or first < 0 or not 0 < rows <= matrix.shape[0] - first:
        raise ValueError(f"{op}: rows {first} .. {first + rows - 1} of {matrix.shape[0]}, in vectors of {length}")
    check(op, "out", out, matrix.indices.device, tuple(TYPES), rows * matrix.shape[1])
    check_cuda(op, "indices", matrix.indices)
    kernels.module().vptq_dequantize(
        matrix=vptq_arguments(matrix),
        stored=TYPES[matrix.centroids.dtype],
        **slab_arguments(first, out),
        **place(out),
    )
    return out


def vptq_dequantize_bytes(matrix: VptqOperand, dtype: torch.dtype) -> int:
    """Bytes that must move for the whole matrix: its tensors once, the weights once."""
    return matrix.nbytes + matrix.shape[0] * matrix.shape[1] * dtype.itemsize


def check_vptq(op: str, matrix: VptqOperand, dtypes: tuple[torch.dtype, ...] = HALF_TYPES) -> None:
    """Raises ValueError, naming the tensor, unless all of them have the dtype, size and device that they must."""
    (out, columns), device = matrix.shape, matrix.indices.device
    if matrix.indices.dim() != 3 or matrix.centroids.dim() != 3:
        shapes = f"{tuple(matrix.indices.shape)} and {tuple(matrix.centroids.shape)}"
        raise ValueError(f"{op}: indices and centroids have shapes {shapes}, must have three sizes")
    groups, count, length = matrix.centroids.shape
    size, vectors = (columns - matrix.outliers) // groups, -(-out // length)
    dtype = matrix.centroids.dtype
    check(op, "centroids", matrix.centroids, device, dtypes, matrix.centroids.numel())
    if matrix.res_centroids is not None:
        check(op, "res_centroids", matrix.res_centroids, device, (dtype,), groups * matrix.residuals * length)
    bits = _bits(count) + _bits(matrix.residuals)
    if matrix.words:
        if count & (count - 1) or matrix.residuals & (matrix.residuals - 1) or not 1 <= bits <= WORD:
            raise ValueError(f"{op}: {count} and {matrix.residuals} entries cannot be packed into words of {WORD} bits")
        check(op, "indices", matrix.indices, device, (torch.int32,), groups * vectors * -(-size * bits // WORD))
    else:
        check(op, "indices", matrix.indices, device, (torch.int16,), groups * vectors * size)
        if (matrix.res_indices is None) != (matrix.res_centroids is None):
            raise ValueError(f"{op}: one of res_indices and res_centroids is None")
        if matrix.res_indices is not None:
            check(op, "res_indices", matrix.res_indices, device, (torch.int16,), groups * vectors * size)
    _check_outliers(op, matrix, dtype)
    for name in ("places", "weight_scale", "weight_bias"):
        tensor = getattr(matrix, name)
        if tensor is not None:
            check(op, name, tensor, device, (torch.int16 if name == "places" else dtype,), columns)
    if (matrix.weight_scale is None) != (matrix.weight_bias is None):
        raise ValueError(f"{op}: one of weight_scale and weight_bias is None")


def _check_outliers(op: str, matrix: VptqOperand, dtype: torch.dtype) -> None:
    if (matrix.outlier_indices is None) != (matrix.outlier_centroids is None):
        raise ValueError(f"{op}: one of outlier_indices and outlier_centroids is None")
    if matrix.outlier_indices is None or matrix.outlier_centroids is None:
        return
    count, length = matrix.outlier_centroids.shape
    device = matrix.indices.device
    check(op, "outlier_centroids", matrix.outlier_centroids, device, (dtype,), count * length)
    vectors = -(-matrix.shape[0] // length)
    check(op, "outlier_indices", matrix.outlier_indices, device, (torch.int16,), vectors * matrix.outliers)


def _bits(count: int) -> int:
    return (count - 1).bit_length() if count else 0


def vptq_arguments(matrix: VptqOperand) -> dict[str, int]:
    """The fields that csrc/gather/bind.cpp reads, by name: addresses, then sizes."""
    order = ("indices", "res_indices", "centroids", "res_centroids", "outlier_indices", "outlier_centroids", "places",
             "weight_scale", "weight_bias")  # fmt: skip
    groups, count, length = matrix.centroids.shape
    outlier_count, outlier_len = (0, 0) if matrix.outlier_centroids is None else matrix.outlier_centroids.shape
    return {
        **addresses(**{name: getattr(matrix, name) for name in order}),
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
        "groups": groups,
        "group_size": matrix.group_size,
        "words": matrix.words,
        "vector_len": length,
        "count": count,
        "residuals": matrix.residuals,
        "outliers": matrix.outliers,
        "outlier_len": outlier_len,
        "outlier_count": outlier_count,
    }
