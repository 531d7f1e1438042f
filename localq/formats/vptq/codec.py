"""The arithmetic of VPTQ: from indices to weights. The format is specified in `formats.vptq`, which others import.

Works on whatever device the tensors are on; rows are worked on in slabs that bound the temporaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localq.files import schemes
from localq.formats.samples import Random

RESIDUAL, BIAS = 0.1, 0.01  # of `sample`: residual codewords and the norm's bias, in parts of a weight's deviation
WORD = 32  # bits of a word of packed indices
CHUNK_WEIGHTS = {"cpu": 2**18, "cuda": 2**20}  # weights; the temporaries take some 20 bytes for each
FIELDS = (
    "indices", "centroids", "res_indices", "res_centroids", "outlier_indices", "outlier_centroids",
    "places", "weight_scale", "weight_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """One quantized matrix [out, in]; the fields are those of the format, None for parts that it does without.

    indices            int32 [groups, vectors, words], or unpacked int16 [groups, vectors, group_size] (bits of a u16)
    centroids          [groups, count, vector_len], 16- or 32-bit floats, as the other tables and the norm
    res_indices        int16 [groups, vectors, group_size]; None where `indices` are packed, which hold both
    res_centroids      [groups, count, vector_len]
    outlier_indices    int16 [outlier vectors, outliers]
    outlier_centroids  [count, vector length of outliers]
    places             int16 [in] (bits of a u16): where each input column lies; the inverse of `perm` of the checkpoint
    weight_scale, weight_bias  [in]

    Every index must be within its table: `vptq_read` makes sure.
    """

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
    def vector_len(self) -> int:
        """Rows that one index gives."""
        return self.centroids.shape[2]

    @property
    def outliers(self) -> int:
        """Columns, first in the order of quantization, that have a codebook of their own."""
        return 0 if self.outlier_indices is None else self.outlier_indices.shape[1]

    @property
    def group_size(self) -> int:
        """Columns of a group."""
        return (self.shape[1] - self.outliers) // self.centroids.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The type that the weights are computed in."""
        norms = (each for each in (self.weight_scale, self.weight_bias) if each is not None)
        return _promoted(self.sum_dtype, *norms)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type of the weights before their norm."""
        tables = (self.res_centroids, self.outlier_centroids)
        return _promoted(self.centroids.dtype, *(each for each in tables if each is not None))

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`, every tensor where `place` copies it, in the order of `FIELDS`."""
        return self._each(place)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (getattr(self, name) for name in FIELDS)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Packed:
        held = {name: getattr(self, name) for name in FIELDS}
        changed: dict[str, Any] = {name: None if each is None else change(each) for name, each in held.items()}
        return Packed(**changed, shape=self.shape)


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in `scheme`: packed indices, one group, a permutation and a norm."""
    (out, columns), random = shape, Random(seed, device)
    length, count, residuals = schemes.vptq_scheme(scheme)
    bits = index_bits(count) + (index_bits(residuals) if residuals else 0)
    words = random.codes(1, -(-out // length), words_of(columns, bits), dtype=torch.int32)
    return Packed(
        words, random.normal(1, count, length), None,
        random.normal(1, residuals, length, deviation=RESIDUAL) if residuals else None, None, None,
        random.permutation(columns), random.scales(columns**-0.5, columns),
        random.normal(columns, deviation=BIAS * columns**-0.5), shape,
    )  # fmt: skip


def _promoted(dtype: torch.dtype, *others: Tensor) -> torch.dtype:
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on the device of `packed`. This is the definition."""
    return dequantize_rows(packed, 0, packed.shape[0], dtype)


def dequantize_rows(packed: Packed, first: int, count: int, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """Rows first .. first+count-1 of the matrix, [count, in] of `dtype`, written into `weight` where it is given.

    `first` is a multiple of `vector_len`, as vectors are read whole. Raises ValueError for rows that are not there.
    """
    length, columns = packed.vector_len, packed.shape[1]
    if first % length or first < 0 or not 0 < count <= packed.shape[0] - first:
        raise ValueError(f"rows {first} .. {first + count - 1} of {packed.shape[0]}, in vectors of {length}")
    device = packed.indices.device
    if weight is None:
        weight = torch.empty(count, columns, dtype=dtype, device=device)
    places = None if packed.places is None else _unsigned(packed.places)
    rows = max(1, CHUNK_WEIGHTS.get(device.type, 2**18) // (length * columns)) * length
    for begin in range(first, first + count, rows):
        end = min(begin + rows, first + count)
        weight[begin - first : end - first] = _slab(packed, begin, end, places)
    return weight


def _slab(packed: Packed, begin: int, end: int, places: Tensor | None) -> Tensor:
    """Rows begin .. end-1 in `packed.dtype`; `places`: where each input column lies in the order of quantization."""
    outliers, size = packed.outliers, packed.group_size
    columns = packed.shape[1]
    slab = torch.empty(end - begin, columns, dtype=packed.sum_dtype, device=packed.indices.device)
    if outliers:
        slab[:, :outliers] = _outliers(packed, begin, end)
    for group in range(packed.centroids.shape[0]):
        start = outliers + group * size
        slab[:, start : start + size] = _group(packed, group, begin, end)
    if places is not None:
        slab = slab.index_select(1, places)
    if packed.weight_scale is not None and packed.weight_bias is not None:
        slab = slab * packed.weight_scale + packed.weight_bias  # two roundings, as the reference has them
    return slab


def _group(packed: Packed, group: int, begin: int, end: int) -> Tensor:
    """Rows begin .. end-1 of the columns of one group."""
    vectors = slice(begin // packed.vector_len, -(-end // packed.vector_len))
    main, residual = _indices(packed, group, vectors)
    values = _codewords(packed.centroids[group], main)
    if packed.res_centroids is not None and residual is not None:
        values = values + _codewords(packed.res_centroids[group], residual)
    return values[: end - begin]


def _indices(packed: Packed, group: int, vectors: slice) -> tuple[Tensor, Tensor | None]:
    """Of the main and of the residual codebook, each [vectors, group_size]."""
    stored = packed.indices[group, vectors]
    if stored.dtype != torch.int32:
        residual = None if packed.res_indices is None else _unsigned(packed.res_indices[group, vectors])
        return _unsigned(stored), residual
    main_bits = index_bits(packed.centroids.shape[1])
    if packed.res_centroids is None:
        return unpack(stored, packed.group_size, main_bits), None
    both = unpack(stored, packed.group_size, main_bits + index_bits(packed.res_centroids.shape[1]))
    return both & ((1 << main_bits) - 1), both >> main_bits


def _outliers(packed: Packed, begin: int, end: int) -> Tensor:
    """Rows begin .. end-1 of the outlier columns, whose vectors may begin at other rows than the main ones."""
    assert packed.outlier_indices is not None  # for the type checker: there are outliers
    assert packed.outlier_centroids is not None
    length = packed.outlier_centroids.shape[1]
    first = begin // length
    indices = _unsigned(packed.outlier_indices[first : -(-end // length)])
    return _codewords(packed.outlier_centroids, indices)[begin - first * length : end - first * length]


def _codewords(table: Tensor, indices: Tensor) -> Tensor:
    """table [count, length], indices [vectors, columns] -> [vectors * length, columns]: each vector goes down."""
    vectors, columns = indices.shape
    values = table.index_select(0, indices.reshape(-1)).view(vectors, columns, -1)
    return values.transpose(1, 2).reshape(-1, columns)


def _unsigned(stored: Tensor) -> Tensor:
    """int16 with the bits of a u16 -> int32 of that value."""
    return stored.to(torch.int32) & 0xFFFF


# ---- packed indices


def index_bits(count: int) -> int:
    """Bits of an index into a codebook of `count` entries."""
    return (count - 1).bit_length()


def words_of(columns: int, bits: int) -> int:
    """Words of a row of `columns` packed indices."""
    return -(-columns * bits // WORD)


def unpack(words: Tensor, columns: int, bits: int) -> Tensor:
    """int32 [..., words_of(columns, bits)] -> int64 [..., columns]: bits j*bits .. of the row, the lowest first.

    An index may begin in one word and end in the next. Each is below 2^bits, so that it fits a table of that size.
    """
    offsets = torch.arange(columns, device=words.device) * bits
    word, shift = offsets // WORD, offsets % WORD
    unsigned = words.long() & 0xFFFFFFFF
    low = unsigned[..., word] >> shift
    after = (word + 1).clamp(max=words.shape[-1] - 1)  # past the last word nothing is needed, and the mask drops it
    return (low | unsigned[..., after] << (WORD - shift)) & ((1 << bits) - 1)
