"""The search on the CPU: the optimum where it can hold all ways, errors that are the loss, beams that pay, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from localq import kernels
from localq.formats.codebooks.search_kernel import Codebook, events, vq_search
from localq.quantize.codebooks import encode
from localq.quantize.codebooks.encode import decode, search_codes
from localq.quantize.model.statistics import factor
from localq.quantize.settings import Effort
from tests.support.kernels.search_operands import Block, block, followed, search

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

SCHEMES = {
    "s4l16": [(4, 16)],
    "s8l8+s8l8": [(8, 8), (8, 8)],
    "s4l16+s8l16": [(4, 16), (8, 16)],
    "s4l16+s16l16": [(4, 16), (16, 16)],
    "s4l16+s4l16": [(4, 16), (4, 16)],
}
every_scheme = pytest.mark.parametrize("shapes", SCHEMES.values(), ids=SCHEMES)
ROUNDING = 3e-5  # relative, of f32 sums of at most a hundred terms: 100 * 2^-24 is 6e-6


def few(operands: Block, words: int) -> Block:
    """All but `words` codewords of every book, spread over its numbers, are far from anything."""
    books = []
    for book in operands.books:
        codewords = torch.full_like(book.codewords, 500.0)
        kept = near(words)
        codewords[kept] = book.codewords[kept]
        books.append(Codebook(book.stride, codewords))
    return replace(operands, books=books)


def near(words: int) -> Tensor:
    return torch.arange(words) * (255 // words) + 3


@pytest.mark.parametrize(
    ("shapes", "columns", "words"),
    [
        ([(4, 16)], 20, 4),  # five positions: the first codeword has ended
        ([(2, 6)], 10, 4),
        ([(8, 8), (8, 8)], 16, 6),
        ([(8, 16), (4, 8)], 12, 4),
        ([(4, 16), (16, 16)], 12, 5),
        ([(4, 16), (4, 4)], 8, 6),
    ],
)
def test_a_beam_that_holds_all_ways_finds_the_best_of_all(shapes, columns, words):
    """Up to the last event there are at most 256 ways over near codewords, and any other costs more than these."""
    operands = few(block(3, columns, shapes, 256), words)
    order = events(operands.books, columns)
    assert words ** (len(order) - 1) <= 256
    ways = torch.tensor(list(itertools.product(near(words).tolist(), repeat=len(order))))
    codes = [ways[:, [at for at, (book, _) in enumerate(order) if book == number]] for number in range(len(shapes))]
    found = search(operands).costs()
    for row in range(3):
        wide = len(ways)
        alone = replace(
            operands, targets=operands.targets[row].expand(wide, -1), tails=operands.tails[row].expand(wide, -1)
        )
        best = followed(alone, codes)[0].square().sum(1).min()
        torch.testing.assert_close(found[row], best, rtol=ROUNDING, atol=0)


@every_scheme
def test_errors_and_tails_are_those_of_the_codes(shapes):
    operands = block(7, 48, shapes, 24)
    found = search(operands)
    assert [tuple(codes.shape) for codes in found.codes] == [(7, 48 // stride) for stride, _ in shapes]
    errors, tails = followed(operands, found.codes)
    torch.testing.assert_close(found.errors.double(), errors, rtol=ROUNDING, atol=ROUNDING * float(errors.abs().max()))
    torch.testing.assert_close(found.tails.double(), tails, rtol=ROUNDING, atol=ROUNDING * float(tails.abs().max()))


def metric_of(columns: int, seed: int = 4) -> Tensor:
    """Of inputs that are correlated, some large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * columns, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    x[:, 5] *= 6
    return x.T @ x / (len(x) * columns)


def noise(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def random_books(shapes: list[tuple[int, int]]) -> list[Codebook]:
    return block(1, 16, shapes, 1).books


@every_scheme
@pytest.mark.parametrize("columns", [32, 48, 160], ids=lambda each: f"blocks of {each}")
def test_squared_errors_of_joined_blocks_are_the_loss(shapes, columns, monkeypatch):
    """160 columns are not a multiple of 48; a block's codewords reach over into the next."""
    weight, metric, books, squares = noise(5, 160), metric_of(160), random_books(shapes), []

    def spy(*arguments):
        codes, errors = vq_search(*arguments)
        squares.append(errors.double().square().sum(1))
        return codes, errors

    monkeypatch.setattr(encode, "vq_search", spy)
    found = factor(metric, min(stride for stride, _ in shapes))
    codes = search_codes(weight, torch.ones(5, 1), found, books, Effort(beam=6, columns=columns))
    assert len(squares) == -(-160 // columns)
    error = weight.double() - decode(codes, books, 160).double()
    loss = ((error @ metric.double()) * error).sum(1)
    # V and its inverse are rounded to f32; the inverse is as much as cond(V) larger than what it takes back.
    condition = float(torch.linalg.cond(metric.double())) ** 0.5
    torch.testing.assert_close(torch.stack(squares).sum(0), loss, rtol=2**-23 * condition * 10, atol=0)


@every_scheme
def test_with_one_way_the_blocks_do_not_matter(shapes):
    weight, found, books = noise(6, 96), factor(metric_of(96), min(each[0] for each in shapes)), random_books(shapes)
    whole, parts = (
        search_codes(weight, torch.ones(6, 1), found, books, Effort(beam=1, columns=columns)) for columns in (96, 32)
    )
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


@every_scheme
def test_wider_beams_cost_less_on_average(shapes):
    costs = [float(search(block(96, 48, shapes, beam)).costs().mean()) for beam in (1, 3, 16, 80)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < 0.95 * costs[0]


def test_threads_and_neighbours_change_nothing(monkeypatch):
    operands = block(9, 32, [(4, 16)], 12)
    whole = search(operands)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    part = replace(operands, targets=operands.targets[2:5], tails=operands.tails[2:5])
    assert torch.equal(search(part).codes[0], whole.codes[0][2:5])


def test_the_finest_books_are_read_first():
    books = [Codebook(8, torch.zeros(256, 16)), Codebook(4, torch.zeros(256, 16))]
    assert events(books, 16) == [(1, False), (0, True), (1, True), (1, False), (0, True), (1, True)]


BROKEN = {
    "targets of f64": lambda o: replace(o, targets=o.targets.double()),
    "NaN": lambda o: replace(o, targets=o.targets * torch.tensor(float("nan"))),
    "infinite codewords": lambda o: replace(o, books=[Codebook(4, o.books[0].codewords / 0)]),
    "feedback of another width": lambda o: replace(o, feedback=o.feedback[:-4]),
    "too few triangles": lambda o: replace(o, white=o.white[:-1]),
    "short tails": lambda o: replace(o, tails=o.tails[:, :-4]),
    "tails of other rows": lambda o: replace(o, tails=o.tails[:-1]),
    "255 codewords": lambda o: replace(o, books=[Codebook(4, o.books[0].codewords[:-1])]),
    "a length between the strides": lambda o: replace(o, books=[Codebook(4, o.books[0].codewords[:, :14])]),
    "no beam": lambda o: replace(o, beam=0),
    "too wide a beam": lambda o: replace(o, beam=257),
    "codewords too long": lambda o: replace(o, books=[Codebook(4, torch.zeros(256, 36))], tails=torch.zeros(3, 36)),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_does_not_belong_together_is_refused(broken):
    with pytest.raises(ValueError, match="vq_search"):
        search(broken(block(3, 24, [(4, 16)], 8)))
