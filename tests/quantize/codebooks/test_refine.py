"""Fitting codebooks: the adjoint of decoding, the solution of the normal equations, a loss that only falls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from localq.formats.codebooks.search_kernel import Codebook
from localq.quantize.codebooks.encode import decode
from localq.quantize.codebooks.refine import adjoint, fit_codebooks

SCHEMES = {
    "s4l16": [(4, 16)],
    "s2l6": [(2, 6)],
    "s8l8+s8l8": [(8, 8), (8, 8)],
    "s4l16+s8l16": [(4, 16), (8, 16)],
    "s16l32+s4l4": [(16, 32), (4, 4)],
}
every_scheme = pytest.mark.parametrize("shapes", SCHEMES.values(), ids=SCHEMES)
ROWS = 13


@dataclass(frozen=True)
class Problem:
    """What `fit_codebooks` takes."""

    weight: Tensor
    metric: Tensor
    codes: list[Tensor]
    books: list[Codebook]
    scales: Tensor

    def fitted(self, steps: int) -> list[Codebook]:
        return fit_codebooks(self.weight, self.metric, self.codes, self.books, self.scales, steps)

    def loss(self, books: list[Codebook]) -> float:
        """trace(E H E^T), f64."""
        error = self.weight.double() - self.scales.double() * decode(self.codes, books, self.weight.shape[1]).double()
        return float(((error @ self.metric.double()) * error).sum())


def problem(shapes: list[tuple[int, int]], columns: int = 48, used: int = 256) -> Problem:
    """Random, with only the first `used` codewords in use."""
    generator = torch.Generator().manual_seed(columns)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    x = normal(4 * columns, columns) @ (torch.eye(columns) + 0.3 * normal(columns, columns) / columns**0.5)
    codes = [
        torch.randint(used, (ROWS, columns // stride), generator=generator, dtype=torch.uint8) for stride, _ in shapes
    ]
    books = [Codebook(stride, 0.5 * normal(256, length)) for stride, length in shapes]
    scales = 0.5 + torch.rand(ROWS, 1, generator=generator)
    return Problem(normal(ROWS, columns) * scales, x.T @ x / len(x), codes, books, scales)


@every_scheme
@pytest.mark.parametrize("columns", [16, 48])
def test_gathering_is_the_adjoint_of_decoding(shapes, columns):
    """<decode(C), G> = <C, gathered(G)>; rows of 16 columns are shorter than some codewords."""
    given = problem(shapes, columns)
    matrix = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(9))
    left = (decode(given.codes, given.books, columns).double() * matrix.double()).sum()
    parts = adjoint(matrix, given.codes, given.books)
    right = sum((book.codewords.double() * part.double()).sum() for book, part in zip(given.books, parts, strict=True))
    size = decode(given.codes, given.books, columns).norm() * matrix.norm()
    assert abs(left - right) <= 2**-22 * float(size)


@pytest.mark.cuda
@every_scheme
@pytest.mark.parametrize("columns", [16, 48, 576])
def test_a_gpu_decodes_the_same_bits_and_gathers_within_rounding(shapes, columns):
    given = problem(shapes, columns)
    codes = [each.cuda() for each in given.codes]
    books = [Codebook(book.stride, book.codewords.cuda()) for book in given.books]
    assert torch.equal(decode(codes, books, columns).cpu(), decode(given.codes, given.books, columns))
    matrix = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(9))
    sizes = adjoint(matrix.abs(), given.codes, given.books)
    here, there = adjoint(matrix, given.codes, given.books), adjoint(matrix.cuda(), codes, books)
    for one, other, size in zip(here, there, sizes, strict=True):  # no sum has more terms than there are weights
        assert ((one - other.cpu()).abs() <= 2 * 2**-24 * matrix.numel() * size).all()


def design(given: Problem, used: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """f64 [ROWS * columns, unknowns]: s D of each entry of the codewords in use, and which they are."""
    columns, made, entries = given.weight.shape[1], [], []
    zeros = [Codebook(book.stride, torch.zeros_like(book.codewords)) for book in given.books]
    for number, book in enumerate(given.books):
        for word in range(used):
            for at in range(book.length):
                unit = torch.zeros_like(book.codewords)
                unit[word, at] = 1
                books = [*zeros[:number], Codebook(book.stride, unit), *zeros[number + 1 :]]
                made.append((given.scales * decode(given.codes, books, columns)).flatten().double())
                entries.append((number, word, at))
    return torch.stack(made, 1), entries


@every_scheme
def test_enough_steps_reach_the_least_loss(shapes):
    """Against lstsq in f64 over all unknowns at once; two books share a constant, so losses are what is compared."""
    used = 5
    given = problem(shapes, used=used)
    upper = torch.linalg.cholesky(given.metric.double())
    matrix = design(given, used)[0].view(ROWS, 48, -1)
    whitened = torch.einsum("rcu,cd->rdu", matrix, upper).reshape(ROWS * 48, -1)
    aim = (given.weight.double() @ upper).reshape(-1, 1)
    solution = torch.linalg.lstsq(whitened, aim, driver="gelsd").solution
    least = float((whitened @ solution - aim).square().sum())
    start, reached = given.loss(given.books), given.loss(given.fitted(300))
    assert reached - least <= 1e-5 * (start - least)
    assert least - reached <= 1e-6 * start


@every_scheme
def test_every_step_lowers_the_loss(shapes):
    given = problem(shapes)
    losses = [given.loss(given.fitted(steps)) for steps in range(14)]
    assert losses[0] == given.loss(given.books)
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(losses))
    assert losses[8] < 0.9 * losses[0]


@every_scheme
def test_codewords_that_are_not_used_stay(shapes):
    given = problem(shapes, used=7)
    for before, after in zip(given.books, given.fitted(6), strict=True):
        assert torch.equal(before.codewords[7:], after.codewords[7:])
        assert not torch.equal(before.codewords[:7], after.codewords[:7])


def test_at_the_end_more_steps_change_nothing():
    """Weights that the codebooks make exactly: there is no way to go."""
    given = problem([(8, 8)])
    exact = Problem(decode(given.codes, given.books, 48), torch.eye(48), given.codes, given.books, torch.ones(ROWS, 1))
    for before, after in zip(exact.books, exact.fitted(5), strict=True):
        assert torch.equal(before.codewords, after.codewords)
