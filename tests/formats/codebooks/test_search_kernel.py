"""vq_search on a GPU against the search on the CPU: ways as cheap, errors as its codes make them, the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.search_operands import Block, Found, block, followed, search

ROUNDING = 256 * 2**-24  # of f32, in sums of at most 256 numbers around 1
PARTED, WORST, ROWS = 1e-4, 5e-3, 0.95  # paths may part where two ways cost the same within rounding
SHAPES = {
    "2 bits": (333, 128, [(4, 16)], 16),
    "few rows, wide": (64, 256, [(4, 16)], 33),
    "narrow": (77, 64, [(4, 16)], 8),
    "beam of 64": (35, 128, [(4, 16)], 64),
    "beam of 128": (21, 64, [(4, 16)], 128),
    "2 x 8": (131, 192, [(8, 8), (8, 8)], 24),
    "3 bits": (67, 96, [(8, 16), (4, 12)], 16),
    "4 bits in two books": (51, 64, [(4, 16), (4, 4)], 48),
    "steps of 2": (39, 70, [(2, 10)], 16),
    "steps of 16, four books": (29, 96, [(16, 32), (16, 16), (16, 32), (16, 16)], 13),
    "greedy": (17, 100, [(4, 16)], 1),
}
REFUSED = {
    "steps of 1": ([(1, 4)], 8, "step = 1, must be 2, 4, 8 or 16"),
    "more than a multiprocessor holds": ([(4, 16)], 256, "shared memory"),
}


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_as_cheap_as_the_ways_that_the_host_finds(shape):
    operands = block(*shape)
    got = search(operands.to("cuda"))
    assert_consistent(operands, got)
    ratio = got.costs() / search(operands).costs()
    assert float(ratio.max()) <= 1 + WORST
    assert float(((ratio - 1).abs() <= PARTED).double().mean()) >= ROWS


@pytest.mark.cuda
def test_a_layer_of_many_rows():
    """More rows than the GPU holds at once, some of them the same: rows know nothing of each other."""
    operands = block(611, 64, [(4, 16)], 16)
    repeated = Block(
        operands.targets.repeat(9, 1), operands.feedback, operands.white, operands.books,
        operands.tails.repeat(9, 1), operands.beam,
    )  # fmt: skip
    one, nine = search(operands.to("cuda")), search(repeated.to("cuda"))
    assert torch.equal(nine.codes[0], one.codes[0].repeat(9, 1))
    assert torch.equal(nine.errors, one.errors.repeat(9, 1))


@pytest.mark.cuda
def test_the_same_bits_every_time():
    operands = block(257, 96, [(8, 16), (4, 12)], 40).to("cuda")
    first = search(operands)
    for _ in range(5):
        again = search(operands)
        assert torch.equal(again.errors, first.errors)
        assert torch.equal(again.tails, first.tails)
        assert all(torch.equal(*pair) for pair in zip(again.codes, first.codes, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("beam", [16, 40])
def test_equal_costs_are_taken_in_the_order_of_path_and_code(beam):
    operands = block(33, 32, [(4, 16)], beam)
    operands.books[0].codewords[:] = operands.books[0].codewords[3].clone()
    assert search(operands.to("cuda")).codes[0].count_nonzero() == 0


@pytest.mark.cuda
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_take(case):
    shapes, beam, message = case
    with pytest.raises(ValueError, match=message):
        search(block(3, 512, shapes, beam).to("cuda"))


def assert_consistent(operands: Block, got: Found) -> None:
    """Errors and tails are those of the codes, in fp64."""
    errors, tails = followed(operands, got.codes)
    scale = operands.targets.abs().amax(1, keepdim=True)
    assert bool(((got.errors - errors).abs() <= ROUNDING * scale).all())
    assert bool(((got.tails - tails).abs() <= ROUNDING).all())
