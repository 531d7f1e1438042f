"""The arithmetic of vq2: from codes to weights. The format is specified in `vq2`, which others import.

Works on whatever device the tensors are on; rows are worked on in chunks that bound the temporaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.files import schemes
from localq.formats.codebooks import rotation
from localq.formats.codebooks.definition import dequantize_codes
from localq.formats.samples import Random

BLOCK = 16  # columns are a multiple of it, so that every stride divides them
ENTRIES = 256
STRIDES = (2, 4, 8, 16)
LONGEST = 32
MOST_BOOKS = 2
# Weights that are decoded together. On a GPU their temporaries stay within `Format.unpack_bytes`.
CHUNK_WEIGHTS = {"cpu": 2**20, "cuda": 2**21}


@dataclass(frozen=True)
class Packed:
    """One matrix [out, in]. Raises ValueError for tensors that do not belong together.

    books   one or two of (codes u8 [out, in/stride], codebook f16 [256, length]); a codebook may be that of others too
    scales  f16 [out]
    signs   u8 [in/8] of the rotation, None without one
    """

    books: tuple[tuple[Tensor, Tensor], ...]
    scales: Tensor
    signs: Tensor | None
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        out, columns = self.shape
        if out < 1 or columns < 1 or columns % BLOCK:
            raise ValueError(f"{out} x {columns} weights, where columns are a multiple of {BLOCK}")
        if not 1 <= len(self.books) <= MOST_BOOKS:
            raise ValueError(f"{len(self.books)} codebooks, not 1 or {MOST_BOOKS}")
        for number, (codes, codebook) in enumerate(self.books):
            _check_book("" if number == 0 else f"_{number + 1}", codes, codebook, self.shape)
        _check("scales", self.scales, torch.float16, (out,))
        if self.signs is not None:
            _check("signs", self.signs, torch.uint8, (columns // 8,))

    @property
    def strides(self) -> tuple[int, ...]:
        """Of each book: columns from one code to the next."""
        return tuple(self.shape[1] // codes.shape[1] for codes, _ in self.books)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as if no codebook were shared."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def to(self, device: torch.device | str) -> Packed:
        """The same on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def placed(self, place: Callable[[Tensor], Tensor], device: torch.device) -> Packed:
        """The same on `device`, every tensor where `place` copies it: codes, codebook of each book, scales, signs."""
        return self._each(place)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Packed:
        books = tuple((change(codes), change(codebook)) for codes, codebook in self.books)
        scales = change(self.scales)
        return replace(self, books=books, scales=scales, signs=None if self.signs is None else change(self.signs))

    def _tensors(self) -> list[Tensor]:
        signs = [] if self.signs is None else [self.signs]
        return [*(tensor for book in self.books for tensor in book), self.scales, *signs]


def _check_book(suffix: str, codes: Tensor, codebook: Tensor, shape: tuple[int, int]) -> None:
    out, columns = shape
    sizes = codes.dim() == 2 and codes.shape[1] > 0 and columns % codes.shape[1] == 0
    stride = columns // codes.shape[1] if sizes else 0
    if codes.dtype != torch.uint8 or stride not in STRIDES or codes.shape[0] != out:
        why = f"expected uint8 for {out} x {columns} weights and a stride of 2, 4, 8 or 16"
        raise ValueError(f"codes{suffix} is {_described(codes)}; {why}")
    length = codebook.shape[1] if codebook.dim() == 2 else 0
    if length % stride or not stride <= length <= LONGEST:
        why = f"expected [{ENTRIES}, length] with a length from {stride} to {LONGEST} that is a multiple of {stride}"
        raise ValueError(f"codebook{suffix} is {_described(codebook)}; {why}")
    _check(f"codebook{suffix}", codebook, torch.float16, (ENTRIES, length))


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} is {_described(tensor)}, not {str(dtype).removeprefix('torch.')} {list(shape)}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def sample(shape: tuple[int, int], seed: int, device: torch.device | str = "cpu", scheme: str = "") -> Packed:
    """Random weights [out, in] of about unit gain in `scheme`: "s4l16"; codebooks of their own, without a rotation."""
    (out, columns), random, books = shape, Random(seed, device), []
    described = schemes.vq2_codebooks(scheme)
    gain = sum(length / stride for stride, length in described) ** -0.5
    for stride, length in described:
        books.append((random.codes(out, columns // stride), random.normal(ENTRIES, length, deviation=gain)))
    return Packed(tuple(books), random.scales(columns**-0.5, out), None, shape)


# ---- dequantize


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrix that `packed` stands for: [out, in] of `dtype`, on its device. This is the definition."""
    weight = torch.empty(packed.shape, dtype=dtype, device=packed.scales.device)
    return _in_chunks(packed, 0, weight, packed.signs)


def decode_rows(packed: Packed, first: int, out: Tensor) -> Tensor:
    """Rows of the DECODED matrix from `first` on into `out` [count, in], and `out`.

    Without signs those of W; with signs those of W diag(signs) H, which are multiplied with a rotated x.
    """
    return _in_chunks(packed, first, out, None)


def _in_chunks(packed: Packed, first: int, out: Tensor, signs: Tensor | None) -> Tensor:
    step = max(1, CHUNK_WEIGHTS.get(out.device.type, 2**20) // packed.shape[1])
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        _chunk(packed, slice(first + begin, first + begin + len(part)), signs, part)
    return out


def _chunk(packed: Packed, rows: slice, signs: Tensor | None, out: Tensor) -> None:
    """A function of its own, so that the temporaries of one chunk are gone when the next begins."""
    weight: Tensor | None = None
    for (codes, codebook), stride in zip(packed.books, packed.strides, strict=True):
        length = codebook.shape[1]
        weight = dequantize_codes(codes[rows, :, None], codebook[None], stride, length, packed.shape[1], weight)
    assert weight is not None  # there is at least one book
    weight *= packed.scales[rows, None].float()
    out.copy_(weight if signs is None else rotation.unrotate_(weight, signs))
