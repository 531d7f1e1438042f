"""Codebooks for noise: training lowers the error, and every scheme that is promised is in the package."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from localq import kernels
from localq.errors import ExitCode, LocalqError
from localq.files.schemes import vq2_codebooks
from localq.quantize.codebooks import initial_codebooks
from localq.quantize.codebooks.initial_codebooks import SCHEMES, load_initial, mean_square_error, train

CPU = torch.device("cpu")
searching = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")


@searching
@pytest.mark.parametrize("scheme", ["s4l16", "s8l8+s8l8", "s4l16+s16l16"])
def test_training_lowers_the_error(scheme):
    first, later = (mean_square_error(train(scheme, rows=40, rounds=rounds, beam=4), 16, 4) for rounds in (1, 6))
    bits = sum(8 / stride for stride, _ in vq2_codebooks(scheme))
    assert 4**-bits < later < 0.95 * first


@searching
def test_the_same_seed_makes_the_same_books():
    one, same, other = (train("s8l8", rows=4, rounds=2, beam=4, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one[0].codewords, same[0].codewords)
    assert not torch.equal(one[0].codewords, other[0].codewords)


def test_every_scheme_is_in_the_package():
    held = load_file(initial_codebooks.FILE)
    assert set(held) == {f"{scheme}.{number}" for scheme in SCHEMES for number, _ in enumerate(vq2_codebooks(scheme))}
    for scheme in SCHEMES:
        found = load_initial(scheme, CPU)
        assert [(book.stride, book.length) for book in found] == vq2_codebooks(scheme)
        for number, book in enumerate(found):
            assert book.codewords.shape == (256, book.length)
            assert book.codewords.dtype == torch.float32
            assert torch.equal(book.codewords, held[f"{scheme}.{number}"].float())


SCALAR = {2: 0.1175, 3: 0.03454, 4: 0.009497}  # of the best quantizers of single Gaussian values (Max 1960, table I)


@searching
@pytest.mark.parametrize("scheme", [each for each in SCHEMES if "s16" not in each])
def test_books_of_the_package_beat_the_best_scalar_quantizers(scheme):
    bits = sum(8 // stride for stride, _ in vq2_codebooks(scheme))
    assert 4**-bits < mean_square_error(load_initial(scheme, CPU), 32, 32) < SCALAR[bits]


@pytest.mark.parametrize("scheme", ["s4l12", "s2l8", "s4l4+s4l4", "s5l10", "2x8", "s4l16+s4l16+s4l16"])
def test_other_schemes_have_none(scheme):
    with pytest.raises(LocalqError, match="vq2") as caught:
        load_initial(scheme, CPU)
    assert caught.value.exit_code == ExitCode.USAGE
