"""Additive codebooks and VPTQ to plain weights, for prefill: checks of the tensors, then the kernels on torch's stream.

Bit for bit what `localq/quant/additive.py` and the formats built on it, and `localq/quant/vptq_codec.py`, define.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place

WIDTHS = {torch.uint8: 256, torch.int8: 256, torch.int16: 65_536}  # type of codes -> entries that they can tell apart
MOST_BOOKS, LONGEST = 256, 65_536
WORD = 32


@dataclass(frozen=True)
class CodeSet:
    """Codebooks of one stride and length.

    codes      u8 | i8 | i16 [out / out_group, in / stride, books]    they count modulo `entries`
    codebooks  f16 | bf16 | f32 [books, entries, length]              length: out_group rows, one after the other
    stride     columns from one code to the next
    """

    codes: Tensor
    codebooks: Tensor
    stride: int


@dataclass(frozen=True)
class VptqMatrix:
    """The tensors of one matrix [out, in] in VPTQ, as `quant.vptq_codec.Packed` has and describes them."""

    indices: Tensor
    centroids: Tensor
    res_indices: Tensor | None
    res_centroids: Tensor | None
    outlier_indices: Tensor | None
    outlier_centroids: Tensor | None
    places: Tensor | None
    weight_scale: Tensor | None
    weight_bias: Tensor | None
    shape: tuple[int, int]

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.shape[1]

    @property
    def outliers(self) -> int:
        """Columns, first in the order of quantization, that have a codebook of their own."""
        return 0 if self.outlier_indices is None else self.outlier_indices.shape[1]

    @property
    def words(self) -> int:
        """Words of a row of packed indices; 0 where they are unpacked."""
        return self.indices.shape[2] if self.indices.dtype == torch.int32 else 0

    @property
    def residuals(self) -> int:
        """Entries of a residual codebook, 0 without one."""
        return 0 if self.res_centroids is None else self.res_centroids.shape[1]

    def tensors(self) -> list[Tensor]:
        """All that are there."""
        held = (getattr(self, each.name) for each in fields(self))
        return [each for each in held if isinstance(each, Tensor)]

    def dtypes(self) -> set[torch.dtype]:
        """The types of tables and norm; the kernels take one."""
        floats = (self.centroids, self.res_centroids, self.outlier_centroids, self.weight_scale, self.weight_bias)
        return {each.dtype for each in floats if each is not None}


# ---- additive codebooks


def additive_dequantize(
    sets: Sequence[CodeSet], scales: Tensor, first: int, out: Tensor, *, out_group: int = 1, rounded: bool
) -> Tensor:
    """Rows of a matrix from `first` on into `out` [count, in] of f16, bf16 or f32, and `out`.

    sets     one or two; terms of the second are added to the sum of the first
    scales   [out / out_group] of the type of the codebooks: of groups of rows, in which `first` and count are whole
    rounded  sum and product are rounded to the type of the codebooks (AQLM), or only the f32 product to that of `out`

    Memory-bound with small codebooks: `additive_dequantize_bytes`. Raises ValueError by the argument's name.
    """
    op, columns = "additive_dequantize", out.shape[-1]
    if out.dim() != 2 or not 1 <= len(sets) <= 2:
        raise ValueError(f"{op}: out has shape {tuple(out.shape)} for {len(sets)} sets, must be [count, in] for 1 or 2")
    groups, device = scales.numel(), sets[0].codes.device
    rows = groups * out_group
    if first % out_group or out.shape[0] % out_group or not 0 <= first <= rows - out.shape[0]:
        raise ValueError(f"{op}: rows {first} .. {first + out.shape[0] - 1} of {rows}, in groups of {out_group}")
    check(op, "out", out, device, tuple(TYPES), out.numel())
    check(op, "scales", scales, device, (sets[0].codebooks.dtype,), groups)
    for each in sets:
        _check_set(op, each, groups, columns, out_group, sets[0].codebooks.dtype)
    check_cuda(op, "codes", sets[0].codes)
    kernels.module().additive_dequantize(
        sets=[_of_kernel(each) for each in sets],
        scales=scales.data_ptr(),
        out_features=rows,
        in_features=columns,
        out_group=out_group,
        rounded=rounded,
        stored=TYPES[scales.dtype],
        out=out.data_ptr(),
        type=TYPES[out.dtype],
        row_begin=first,
        row_count=out.shape[0],
        **place(out),
    )
    return out


def additive_dequantize_bytes(sets: Sequence[CodeSet], rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes that must move for so many rows: codes and codebooks once, the weights once."""
    codes = sum(rows * (columns // each.stride) * each.codes.shape[2] * each.codes.element_size() for each in sets)
    return codes + sum(each.codebooks.nbytes for each in sets) + rows * columns * dtype.itemsize


def _check_set(op: str, given: CodeSet, groups: int, columns: int, out_group: int, dtype: torch.dtype) -> None:
    codes, books = given.codes, given.codebooks
    if codes.dim() != 3 or books.dim() != 3 or books.shape[0] != codes.shape[2] or books.shape[0] > MOST_BOOKS:
        raise ValueError(f"{op}: codes {tuple(codes.shape)} and codebooks {tuple(books.shape)} do not belong together")
    entries, length = books.shape[1:]
    check(op, "codes", codes, codes.device, tuple(WIDTHS), groups * -(-columns // given.stride) * books.shape[0])
    check(op, "codebooks", books, codes.device, (dtype,), books.numel())
    if entries < 2 or entries & (entries - 1) or entries > WIDTHS[codes.dtype]:
        raise ValueError(f"{op}: codebooks have {entries} entries, must be a power of two that the codes can count to")
    if columns % given.stride or length % (out_group * given.stride) or length > LONGEST:
        why = f"length {length}, stride {given.stride}, groups of {out_group} rows, {columns} columns"
        raise ValueError(f"{op}: codebooks have a {why}, which do not divide each other")


def _of_kernel(given: CodeSet) -> tuple[int, int, int, int, int, int, bool]:
    wide = given.codes.dtype == torch.int16
    return given.codes.data_ptr(), given.codebooks.data_ptr(), *given.codebooks.shape, given.stride, wide


# ---- VPTQ


def vptq_dequantize(matrix: VptqMatrix, first: int, out: Tensor) -> Tensor:
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
        out=out.data_ptr(),
        type=TYPES[out.dtype],
        row_begin=first,
        row_count=rows,
        **place(out),
    )
    return out


def vptq_dequantize_bytes(matrix: VptqMatrix, dtype: torch.dtype) -> int:
    """Bytes that must move for the whole matrix: its tensors once, the weights once."""
    return sum(each.nbytes for each in matrix.tensors()) + matrix.shape[0] * matrix.shape[1] * dtype.itemsize


def check_vptq(op: str, matrix: VptqMatrix, dtypes: tuple[torch.dtype, ...] = HALF_TYPES) -> None:
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


def _check_outliers(op: str, matrix: VptqMatrix, dtype: torch.dtype) -> None:
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


def vptq_arguments(matrix: VptqMatrix) -> tuple[list[int], list[int]]:
    """The matrix as csrc/bind_gather.cpp takes it: addresses and sizes."""
    held = (
        matrix.indices, matrix.res_indices, matrix.centroids, matrix.res_centroids, matrix.outlier_indices,
        matrix.outlier_centroids, matrix.places, matrix.weight_scale, matrix.weight_bias,
    )  # fmt: skip
    groups, count, length = matrix.centroids.shape
    outlier_count, outlier_len = (0, 0) if matrix.outlier_centroids is None else matrix.outlier_centroids.shape
    sizes = [
        *matrix.shape, groups, (matrix.shape[1] - matrix.outliers) // groups, matrix.words, length, count,
        matrix.residuals, matrix.outliers, outlier_len, outlier_count,
    ]  # fmt: skip
    return [0 if each is None else each.data_ptr() for each in held], sizes
