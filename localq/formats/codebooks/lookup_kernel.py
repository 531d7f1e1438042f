"""Products with additive codebooks of 256 codewords: vq2, and AQLM's 1x8 and 2x8. Checks, then the kernel.

Works under CUDA graph capture and allocates nothing but its result. What a matrix must look like (codes in tiles,
codewords as fragments) is made by `formats.codebooks.tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localq import kernels
from localq.kernels import gemv
from localq.kernels.checks import HALF_TYPES, addresses, check, check_cuda, place
from localq.kernels.operand import Operand, address, equal
from localq.kernels.workspace import workspace_of

ENTRIES, TILE = 256, 16  # codewords of a book; rows of a tile
STRIDES = (2, 4, 8, 16)
BOOKS = 2  # of one matrix, at most
STEP, LONGEST = 16, 32  # weights of a codeword in a product of the tensor cores; the most that a codeword has
COLUMNS, TURNED_COLUMNS = 8, 16  # a matrix has a multiple of them; where x is rotated


@dataclass(frozen=True)
class VqBook:
    """A codebook and its codes: weight j of a row gets codeword[code of h][j - stride * h] of every h that reaches it.

    codes           u8 or i8 [ceil(out/16) * tile_positions * 16], in tiles of 16 rows: [tile][position][row in it]
    fragments       f16 [16, steps, 32, 8]: the codewords times 1 / factor, see `formats.codebooks.tiles.fragments`
    stride          columns from one code to the next
    before          positions of other books that come first in a tile; of this book there are in / stride
    tile_positions  positions of all books whose codes lie in `codes`
    """

    codes: Tensor
    fragments: Tensor
    stride: int
    before: int
    tile_positions: int

    @property
    def steps(self) -> int:
        """A codeword has at most 16 times as many weights."""
        return self.fragments.shape[1]


@dataclass(frozen=True)
class VqOperand(Operand):
    """A matrix [out, in] in codebooks of 256 codewords, in % 8 == 0: weight = scales[row] * factor * sum of codewords.

    scales  f16 or bf16 [out]
    signs   u8 [in / 8] where the matrix multiplies a rotated x (`formats.codebooks.rotation`): the launch rotates it
    """

    books: tuple[VqBook, ...]
    scales: Tensor
    factor: float
    out_features: int
    in_features: int
    signs: Tensor | None = field(default=None, kw_only=True)

    @property
    def codes(self) -> Tensor:
        """Codes of the first codebook."""
        return self.books[0].codes

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads of it."""
        codes = sum(self.out_features * (self.in_features // book.stride) for book in self.books)
        return codes + sum(book.fragments.nbytes for book in self.books) + self.scales.nbytes

    @property
    def around_x(self) -> Tensor | None:
        """The signs of the rotation."""
        return self.signs

    @property
    def key(self) -> tuple[object, ...]:
        """One launch has one x, rotated or not, and books of one kind."""
        places = tuple((book.stride, book.steps, book.before, book.tile_positions) for book in self.books)
        return places, self.scales.dtype, address(self.signs)

    @property
    def launch(self) -> Callable[..., Tensor]:
        """`vq_gemv`."""
        return vq_gemv

    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether a kernel reads it: on a GPU, in 16 bit."""
        return self.codes.is_cuda and dtype in HALF_TYPES

    def copy(self) -> VqOperand:
        """Codes and scales of its own; the fragments of codewords are shared."""
        books = tuple(replace(book, codes=book.codes.clone()) for book in self.books)
        return replace(self, books=books, scales=self.scales.clone())

    def sharing(self, first: VqOperand) -> VqOperand:
        """The signs of the rotation."""
        return replace(self, signs=first.signs) if equal(self.signs, first.signs) else self


def vq_gemv(
    x: Tensor,
    operands: Sequence[VqOperand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = residual + norm(x) W^T + biases for few rows. x [rows <= 8, in] float16 or bfloat16 -> [rows, sum of outs].

    `operands` share x, its signs, and have books of the same strides: one, or q, k and v, or gate and up; their
    results lie behind each other. With `activation` there are two of one size and y = activation(first) * second.
    `norm` needs one row. So do signs, with which norm(x) is rotated before it is multiplied, to the bits of
    `hadamard`; in % 16 == 0. `out` may be float32 (logits); else the dtype of x. Inner products of x with
    codewords in f32, each rounded to f16 at its own scale, then sums in f32, rounded once; the same bits run after run.
    Raises ValueError by the argument's name.

    Memory-bound: `vq_gemv_bytes` over the memory bandwidth is the floor.
    """
    op = "vq_gemv"
    for matrix in operands:
        if not 1 <= len(matrix.books) <= BOOKS:
            raise ValueError(f"{op}: {len(matrix.books)} books, must be 1 or {BOOKS}")
    gemv.check_x(op, x, [matrix.codes for matrix in operands])
    for matrix in operands:
        check_matrix(op, matrix, x)
    out, arguments = gemv.prepare(op, x, operands, norm, residual, activation, out)
    signs = operands[0].signs
    if any(address(each.signs) != address(signs) for each in operands):
        raise ValueError(f"{op}: signs of operands differ, must be one tensor or None")
    if signs is not None:
        check_signs(op, signs, x)
    check_cuda(op, "codes", operands[0].codes)
    kernels.module().vq_gemv(
        matrices=[matrix_arguments(matrix) for matrix in operands],
        workspace=workspace_of(x.device).arguments,
        signs=0 if signs is None else signs.data_ptr(),
        **arguments,
        **place(x),
    )
    return out


def vq_gemv_bytes(rows: int, out: int, columns: int, strides: Sequence[int] = (4,), itemsize: int = 2) -> int:
    """Bytes that `vq_gemv` must move: codes and scales once, x once, y once; the codebooks are left out."""
    return sum(out * (columns // stride) for stride in strides) + 2 * out + itemsize * rows * (out + columns)


def check_signs(op: str, signs: Tensor, x: Tensor) -> None:
    """Raises ValueError, naming the tensor, unless a product can rotate x [1, in] by `signs`."""
    rows, columns = x.shape
    if rows != 1:
        raise ValueError(f"{op}: x has {rows} rows, must have one with signs")
    if columns % TURNED_COLUMNS:
        raise ValueError(f"{op}: x has {columns} columns, must have a multiple of {TURNED_COLUMNS} with signs")
    check(op, "signs", signs, x.device, (torch.uint8,), columns // 8)


def check_matrix(op: str, matrix: VqOperand, x: Tensor) -> None:
    """Raises ValueError, naming the tensor, unless `matrix` is one that the kernel reads beside x [rows, in]."""
    gemv.check_columns(op, x, matrix.in_features)
    check_tensors(op, matrix, x.device)


def check_tensors(op: str, matrix: VqOperand, device: torch.device) -> None:
    """The same beside any x on `device`."""
    out, columns = matrix.out_features, matrix.in_features
    if out <= 0 or columns <= 0 or columns % COLUMNS:
        raise ValueError(f"{op}: the matrix is {(out, columns)}, its columns must be a positive multiple of {COLUMNS}")
    check(op, "scales", matrix.scales, device, HALF_TYPES, out)
    for book in matrix.books:
        if book.stride not in STRIDES or columns % book.stride:
            raise ValueError(f"{op}: stride = {book.stride}, must be one of {STRIDES} and divide {columns}")
        if not 0 <= book.before <= book.tile_positions - columns // book.stride:
            raise ValueError(f"{op}: before = {book.before}, must leave room among {book.tile_positions} positions")
        tiles = -(-out // TILE)
        check(op, "codes", book.codes, device, (torch.uint8, torch.int8), tiles * book.tile_positions * TILE)
        steps = book.fragments.shape[1] if book.fragments.dim() == 4 else 0
        if steps not in (1, LONGEST // STEP):
            raise ValueError(f"{op}: fragments have shape {tuple(book.fragments.shape)}, must be [16, 1 or 2, 32, 8]")
        check(op, "fragments", book.fragments, device, (torch.float16,), ENTRIES * STEP * steps)


def matrix_arguments(matrix: VqOperand) -> dict[str, object]:
    """The fields that csrc/lookup/bind.cpp reads, by name."""
    books = [
        {
            **addresses(codes=book.codes, fragments=book.fragments),
            "stride": book.stride,
            "steps": book.steps,
            "before": book.before,
            "tile_positions": book.tile_positions,
        }
        for book in matrix.books
    ]
    return {
        "books": books,
        "scales": matrix.scales.data_ptr(),
        "scales_bf16": matrix.scales.dtype == torch.bfloat16,
        "factor": matrix.factor,
        "out_features": matrix.out_features,
        "in_features": matrix.in_features,
    }
