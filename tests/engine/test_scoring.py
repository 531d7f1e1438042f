"""The logits of a given text: those of transformers, by passes in any pieces and by single steps."""

from __future__ import annotations

import torch

from localq.engine.scoring import Decode, Prefill
from tests.support.engine.engine_runs import prompt_of

IDS = prompt_of(53)


@torch.no_grad()
def expected(reference) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([IDS]), use_cache=False).logits[0].float()
    return logits


def test_passes_give_the_logits_of_transformers(loaded, reference):
    source = Prefill(loaded)
    source.logits(prompt_of(90, seed=1), 0)  # what an earlier text left behind
    pieces = [source.logits(IDS[first:stop], first) for first, stop in ((0, 17), (17, 40), (40, 53))]
    torch.testing.assert_close(torch.cat(pieces), expected(reference), rtol=1e-4, atol=1e-4)


def test_single_steps_give_them_too_with_a_cache_of_their_own(loaded, reference):
    steps, passes = Decode(loaded), Prefill(loaded)
    steps.logits(prompt_of(30, seed=2), 0)
    found = []
    for first, stop in ((0, 20), (20, 53)):  # in turn, as they are compared
        passes.logits(prompt_of(stop - first, seed=3), first)
        found.append(steps.logits(IDS[first:stop], first))
    torch.testing.assert_close(torch.cat(found), expected(reference), rtol=1e-4, atol=1e-4)
