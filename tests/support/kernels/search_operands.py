"""Blocks of columns for the search of codes, and what must hold of codes and errors, computed in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localq.formats.codebooks.search_kernel import Codebook, events, vq_search


@dataclass(frozen=True)
class Block:
    """Arguments of `vq_search`."""

    targets: Tensor
    feedback: Tensor
    white: Tensor
    books: list[Codebook]
    tails: Tensor
    beam: int

    def to(self, device: str) -> Block:
        """The same on `device`; tails are a copy."""
        moved = {name: getattr(self, name).to(device) for name in ("targets", "feedback", "white")}
        books = [Codebook(book.stride, book.codewords.to(device)) for book in self.books]
        return replace(self, books=books, tails=self.tails.clone().to(device), **moved)


@dataclass(frozen=True)
class Found:
    """What a search gave, on the CPU: codes of each book, whitened errors, tails for the next block."""

    codes: list[Tensor]
    errors: Tensor
    tails: Tensor

    def costs(self) -> Tensor:
        """f64 [rows]."""
        return self.errors.double().square().sum(1)


def block(rows: int, columns: int, shapes: list[tuple[int, int]], beam: int, seed: int = 1) -> Block:
    """Random weights, and as many books as there are (stride, length) in `shapes`, each weaker than the one before."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    step = min(stride for stride, _ in shapes)
    books = [
        Codebook(stride, 0.6**i * normal(256, length) * 0.8 ** torch.arange(length))
        for i, (stride, length) in enumerate(shapes)
    ]
    white = torch.triu(torch.eye(step) + 0.3 * normal(columns // step, step, step) / step**0.5)
    feedback = normal(columns, columns) * columns**-0.5  # also where it must not be read
    targets = normal(rows, columns)
    targets[rows // 2] *= 7  # an outlier
    tail = max(length for _, length in shapes)
    tails = 0.5 * normal(rows, tail) * (torch.arange(tail) < tail - step)
    return Block(targets, feedback, white, books, tails, beam)


def search(operands: Block) -> Found:
    """Searches; the block's own tails stay as they are."""
    tails = operands.tails.clone()
    o = operands
    codes, errors = vq_search(o.targets, o.feedback, o.white, o.books, tails, o.beam)
    return Found([each.cpu() for each in codes], errors.cpu(), tails.cpu())


def followed(operands: Block, codes: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Errors and tails, f64, that `codes` lead to."""
    rows, columns = operands.targets.shape
    step = operands.white.shape[1]
    decoded = torch.zeros(rows, columns + operands.tails.shape[1], dtype=torch.float64)
    decoded[:, : operands.tails.shape[1]] = operands.tails
    seen = [0] * len(codes)
    column = 0
    errors = torch.zeros(rows, columns, dtype=torch.float64)
    for book, last in events(operands.books, columns):
        words = operands.books[book].codewords.double()[codes[book][:, seen[book]].long()]
        decoded[:, column : column + words.shape[1]] += words
        seen[book] += 1
        if not last:
            continue
        here = slice(column, column + step)
        fed = errors[:, :column] @ operands.feedback[:column, here].double()
        rest = operands.targets[:, here].double() - fed - decoded[:, here]
        errors[:, here] = rest @ operands.white[column // step].double()
        column += step
    return errors, decoded[:, columns:]
