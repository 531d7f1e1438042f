"""Perplexity and KL: worked by hand, and as torch has them; every predicted token counted once, whatever the pieces."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from localq.bench.quality import perplexity
from localq.bench.quality.perplexity import Scores, score
from localq.engine import scoring
from localq.errors import LocalqError
from localq.text.token_windows import Windows

VOCAB, WINDOW = 37, 21


class Table:
    """Logits by position and token, each about (1 + outliers) wide; refuses gaps in what it is fed."""

    def __init__(self, seed: int, near: Table | None = None, by: float = 1.0) -> None:
        noise = torch.randn(WINDOW, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        noise[:, :, seed % VOCAB] *= 6
        self.table = noise if near is None else near.table + by * noise
        self._next = 0

    def logits(self, ids: list[int], first: int) -> torch.Tensor:
        assert first in (0, self._next)
        self._next = first + len(ids)
        return self.table[torch.arange(first, self._next), torch.tensor(ids)]

    def all(self, window: list[int]) -> torch.Tensor:
        return self.table[torch.arange(len(window) - 1), torch.tensor(window[:-1])]


@pytest.fixture
def texts() -> Windows:
    ids = torch.randint(VOCAB, (3, WINDOW), generator=torch.Generator().manual_seed(3))
    return Windows(ids.tolist())


def test_perplexity_by_hand():
    # Two tokens 0 and 1: after the first, token 1 has the odds 3 : 1, and after the second 1 : 4.
    class Odds:
        def logits(self, ids: list[int], first: int) -> torch.Tensor:
            both = torch.tensor([[0.0, math.log(3)], [math.log(4), 0.0], [9.0, -9.0]])
            return both[first : first + len(ids)]

    found = score(Odds(), None, Windows([[0, 1, 1]]), 2)
    assert found == Scores(pytest.approx(math.sqrt(1 / (3 / 4 * 1 / 5))))
    second = score(Odds(), None, Windows([[0, 1, 1]], first=1), 2)
    assert second.perplexity == pytest.approx(5)


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
@pytest.mark.parametrize("first", [0, WINDOW // 2])
def test_as_torch_has_it_in_pieces_of_any_size(texts, rows, first, monkeypatch):
    monkeypatch.setattr(perplexity, "rows_at_a_time", lambda vocab: rows)
    monkeypatch.setattr(perplexity, "JUDGED_BYTES", 8 * VOCAB * 3)
    reference = Table(1)
    tested = Table(2, near=reference, by=0.1)
    found = score(tested, reference, Windows(texts.ids, first), VOCAB)
    ours = torch.cat([tested.all(ids)[first:] for ids in texts.ids]).double()
    theirs = torch.cat([reference.all(ids)[first:] for ids in texts.ids]).double()
    targets = torch.cat([torch.tensor(ids[first + 1 :]) for ids in texts.ids])
    assert len(targets) == 3 * (WINDOW - first - 1)
    assert found.perplexity == pytest.approx(F.cross_entropy(ours, targets).exp().item(), rel=1e-12)
    assert found.reference_perplexity == pytest.approx(F.cross_entropy(theirs, targets).exp().item(), rel=1e-12)
    logged = [F.log_softmax(logits, -1) for logits in (ours, theirs)]
    kl = F.kl_div(*logged, reduction="batchmean", log_target=True).item()
    assert kl > 1e-3
    assert found.kl == pytest.approx(kl, rel=1e-9)
    assert found.top1 == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).double().mean().item())
    assert 0 < found.top1 < 1


def test_a_model_is_no_distance_from_itself(texts):
    found = score(Table(1), Table(1), texts, VOCAB)
    assert (found.kl, found.top1) == (0.0, 1.0)
    assert found.perplexity == found.reference_perplexity


def test_a_small_kl_is_not_lost_in_roundings(texts):
    reference = Table(1)
    by = 2**-14
    found = score(Table(2, near=reference, by=by), reference, texts, VOCAB)
    ten = score(Table(2, near=reference, by=4 * by), reference, texts, VOCAB)
    assert found.kl is not None
    assert ten.kl is not None
    assert 0 < found.kl < 1e-6
    assert ten.kl / found.kl == pytest.approx(16, rel=0.05)  # quadratic in the perturbation


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_an_error_that_names_the_window(texts, bad):
    tested = Table(1)
    tested.table[5, texts.ids[1][5]] = bad
    with pytest.raises(LocalqError, match="non-finite logits in window 2"):
        score(tested, None, texts, VOCAB)


def test_a_perplexity_beyond_numbers_is_an_error(texts):
    class Sure:
        def logits(self, ids: list[int], first: int) -> torch.Tensor:
            return torch.eye(VOCAB)[torch.full((len(ids),), VOCAB - 1)] * 1e4

    with pytest.raises(LocalqError, match="nats per token"):
        score(Sure(), None, Windows([[0] * WINDOW]), VOCAB)


def test_progress_counts_windows(texts):
    said: list[tuple[int, int]] = []
    score(Table(1), None, texts, VOCAB, lambda done, total: said.append((done, total)))
    assert said == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(("vocab", "rows"), [(320, 1024), (49_152, 512), (128_256, 256), (262_144, 128), (2**30, 1)])
def test_the_logits_that_are_held_are_bounded(vocab, rows):
    assert scoring.rows_at_a_time(vocab) == rows
    assert rows == 1 or rows * vocab * 4 <= scoring.LOGIT_BYTES
