"""Codes, codebooks and scales of whole matrices: what is written, and rows of size 0 in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localq import kernels
from localq.formats.codebooks import vq2
from localq.formats.codebooks.search_kernel import Codebook
from localq.quantize.codebooks.encode import decode, encode
from localq.quantize.settings import Effort
from tests.support.kernels.search_operands import block

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

COLUMNS = 64
SHAPES = [(8, 16), (4, 16)]


def books() -> list[Codebook]:
    return [Codebook(book.stride, 0.5 * book.codewords) for book in block(1, 16, SHAPES, 1).books]


def weight_and_metric(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(200, COLUMNS, generator=generator) * torch.linspace(0.3, 2, COLUMNS)
    return 0.05 * torch.randn(rows, COLUMNS, generator=generator), x.T @ x / 200


def test_the_loss_is_that_of_the_matrices_that_are_written():
    weight, metric = weight_and_metric(11)
    found = encode(weight, metric, books(), Effort(beam=8, columns=32, rounds=2))
    matrices = found.matrices([4, 7], None, COLUMNS)
    assert [packed.shape for packed in matrices] == [(4, COLUMNS), (7, COLUMNS)]
    assert matrices[0].books[0][1] is matrices[1].books[0][1]
    error = weight - torch.cat([vq2.dequantize(packed, torch.float32) for packed in matrices])
    energies = [float(((each.double() @ metric.double()) * each.double()).sum()) for each in (error, weight)]
    assert found.loss == pytest.approx(energies[0] / energies[1], rel=1e-4)


def test_more_rounds_are_never_worse():
    weight, metric = weight_and_metric(24)
    losses = [encode(weight, metric, books(), Effort(beam=8, columns=32, rounds=rounds)).loss for rounds in (1, 2, 4)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("rounds", [1, 3])
def test_rows_of_nothing_and_of_next_to_nothing_stay_so(rounds):
    """Their sizes are 0 in 16 bits; what stands for them is at most the least scale times a codeword."""
    weight, metric = weight_and_metric(9)
    weight[2], weight[5] = 0, weight[5] * 1e-9
    found = encode(weight, metric, books(), Effort(beam=8, columns=32, rounds=rounds))
    assert torch.isfinite(found.scales).all()
    assert (found.scales > 0).all()
    plain = decode(found.codes, found.books, COLUMNS)
    largest = float(plain.abs().max())
    assert float((plain * found.scales)[[2, 5]].abs().max()) <= 2**-24 * largest
    assert 0 < found.loss < 0.5


def test_inputs_that_are_always_zero_do():
    weight, metric = weight_and_metric(9)
    found = encode(weight, torch.zeros_like(metric), books(), Effort(beam=8, columns=32))
    plain = decode(found.codes, found.books, COLUMNS) * found.scales
    assert (plain - weight).norm() < 0.7 * weight.norm()
