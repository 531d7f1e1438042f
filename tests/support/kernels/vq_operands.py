"""Matrices with additive codebooks of 256 codewords for the tests of their products, and their weights beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.formats.codebooks import tiles as codebook_tiles
from localq.formats.codebooks.definition import dequantize_codes
from localq.formats.codebooks.lookup_kernel import VqBook, VqOperand

Books = Sequence[tuple[int, int]]  # stride, length of each
SCHEMES: dict[str, Books] = {
    "s4l16": [(4, 16)],
    "s8l8": [(8, 8)],
    "s8l8+s8l8": [(8, 8), (8, 8)],
    "s8l16": [(8, 16)],
    "s16l16": [(16, 16)],
    "s4l16+s16l32": [(4, 16), (16, 32)],
    "s2l8": [(2, 8)],
}


@dataclass(frozen=True)
class VqSample:
    """A matrix as the kernel takes it, its weights f32 [out, in] by the definition, and how it was stored."""

    matrix: VqOperand
    dense: Tensor
    codes: list[Tensor]  # [out, positions, 1] of each book
    codebooks: list[Tensor]  # f16 [256, length]


def make(
    shape: tuple[int, int],
    books: Books,
    seed: int = 0,
    device: str = "cpu",
    scales: torch.dtype = torch.float16,
    together: bool = False,
) -> VqSample:
    """Random codes and codebooks, some codewords and some rows larger than the others; `together`: the codes of all
    books in one tensor, as AQLM has them (books of one stride)."""
    generator = torch.Generator().manual_seed(seed)
    out, columns = shape
    codes, codebooks = [], []
    for stride, length in books:
        codes.append(torch.randint(256, (out, columns // stride, 1), dtype=torch.uint8, generator=generator))
        codebook = 0.02 * torch.randn(256, length, generator=generator)
        codebook[::9] *= 6
        codebooks.append(codebook.half())
    scale = (0.5 + torch.rand(out, generator=generator)).to(scales)
    scale[::5] *= 8
    total = None
    for (stride, length), code, codebook in zip(books, codes, codebooks, strict=True):
        placed, values = code.to(device), codebook[None].to(device)
        total = dequantize_codes(placed, values, stride, length, columns, total)
    factor = codebook_tiles.factor_of(codebooks)
    tiles = (
        [codebook_tiles.tile(torch.cat(codes, 2))] * 2 if together else [codebook_tiles.tile(code) for code in codes]
    )
    held = tuple(
        VqBook(
            tile.to(device),
            codebook_tiles.fragments(codebook, factor).to(device),
            stride,
            before=number * (columns // stride) if together else 0,
            tile_positions=len(books) * (columns // stride) if together else columns // stride,
        )
        for number, ((stride, _), codebook, tile) in enumerate(zip(books, codebooks, tiles[: len(books)], strict=True))
    )
    matrix = VqOperand(held, scale.to(device), factor, out, columns)
    return VqSample(matrix, total * matrix.scales[:, None].float(), codes, codebooks)


def rounding_of_tables(operand: VqSample, x: Tensor) -> float:
    """What entries in f16 may add to the error of a product: each is off by up to 2^-11 of itself, which adds up like
    the steps of a walk; four deviations of the worst result. x [rows, in], on any device."""
    squares = torch.zeros(x.shape[0], operand.matrix.out_features, dtype=torch.float64)
    for book, codes, codebook in zip(operand.matrix.books, operand.codes, operand.codebooks, strict=True):
        positions, length = codes.shape[1], codebook.shape[1]
        padded = torch.nn.functional.pad(x.cpu().double(), (0, length))
        entries = padded.unfold(1, length, book.stride)[:, :positions] @ codebook.double().T
        for row, table in enumerate(entries):
            squares[row] += table[torch.arange(positions), codes[..., 0].long()].square().sum(1)
    deviation = 2**-11 / math.sqrt(3) * squares.sqrt() * operand.matrix.scales.cpu().double()
    return 4 * deviation.max().item()


def by_tables(operand: VqSample, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product as the kernel rounds it, but for its sums, and the sums of magnitudes: x [rows, in] -> two of f32
    [rows, out]. Tables of inner products in f16, at the scale of the row; every code is looked up once."""
    matrix = operand.matrix
    largest = x.float().abs().amax(1, keepdim=True)
    up = torch.exp2(14 - torch.floor(torch.log2(largest)))
    sums, sizes = torch.zeros(2, x.shape[0], matrix.out_features, dtype=torch.float64)
    for book, codes, codebook in zip(matrix.books, operand.codes, operand.codebooks, strict=True):
        positions, length = codes.shape[1], codebook.shape[1]
        padded = torch.cat((x.double() * up, x.new_zeros(x.shape[0], length, dtype=torch.float64)), 1)
        windows = padded.unfold(1, length, book.stride)[:, :positions]
        scaled = (codebook.float() / matrix.factor).half().double()
        inner = torch.zeros(x.shape[0], positions, len(codebook))  # one product of the tensor cores has 16 weights
        for first in range(0, length, codebook_tiles.STEP):
            part = slice(first, first + codebook_tiles.STEP)
            inner = (inner.double() + windows[..., part] @ scaled[:, part].T).float()
        entries = inner.half().double()
        for row, table in enumerate(entries):
            entry = table[torch.arange(positions), codes[..., 0].long()]
            sums[row] += entry.sum(1)
            sizes[row] += entry.abs().sum(1)
    scale = matrix.scales.float() * matrix.factor / up
    return (sums * scale).float(), (sizes * scale).float()


def weights_of(matrix: VqOperand) -> Tensor:
    """f32 [out, in] of a matrix as the kernel takes it: back from tiles and fragments."""
    total = None
    for book in matrix.books:
        shape = (matrix.out_features, book.tile_positions)
        positions = matrix.in_features // book.stride
        codes = codebook_tiles.untile(book.codes.flatten(), shape)[:, book.before : book.before + positions, None]
        parts = book.fragments.float().view(16, book.steps, 8, 4, 2, 2, 2)  # m, k, g, t, upper columns, upper rows, i
        codebook = parts.permute(0, 5, 2, 1, 4, 3, 6).reshape(1, 256, -1) * matrix.factor
        total = dequantize_codes(codes, codebook, book.stride, codebook.shape[2], matrix.in_features, total)
    return total * matrix.scales[:, None].float()
