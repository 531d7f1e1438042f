"""dry_match and adjust on a GPU find and give what the reference does, and XTC drops what it drops, step by step.

The same kernels run on a CPU in test_sampling_emulated.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from localq.engine import sampler
from localq.engine.sampler import NON_FINITE, SamplerState, repeated_lengths
from localq.engine.selftest import replies as selftest_replies
from localq.engine.step.state import StepState
from localq.kernels.logit_adjust import adjust, adjust_bytes, dry_match, dry_match_bytes
from localq.sampling import Sampling

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCABS = [31, 32, 1000, 49152, 128256, 262208]


def random_settings(seed: int) -> Sampling:
    rng = random.Random(seed)
    return Sampling(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.9]),
        top_k=rng.choice([0, 0, 5, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.01]),
        repeat_penalty=rng.choice([1.0, 1.15]),
        dry_multiplier=rng.choice([0.0, 0.8, 10.0]),
        dry_allowed_length=rng.choice([1, 2, 5]),
        dry_penalty_last_n=rng.choice([-1, 100]),
        xtc_probability=rng.choice([0.0, 0.5, 1.0]),
        xtc_threshold=rng.choice([0.002, 0.05, 0.2]),
        seed=seed,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("vocab", VOCABS)
def test_replies_are_those_of_the_reference(vocab):
    for seed in range(16):
        sampling, masked = random_settings(seed), bool(seed % 2)
        twins = [StepState(SamplerState(vocab, 700, place), place) for place in (CPU, CUDA)]
        for twin in twins:
            prompt = selftest_replies.prompt_of(600, vocab)
            twin.sampler.reset(sampling, prompt, 8, breakers=[vocab // selftest_replies.WORDS])
        for step in range(8):
            logits = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(100 * seed + step))
            for twin, place in zip(twins, (CPU, CUDA), strict=True):
                if masked:
                    twin.sampler.allow(selftest_replies.mask_of(vocab))
                twin.choose(logits.to(place, copy=True), sampling.greedy)
            assert int(twins[1].chosen) == int(twins[0].chosen), (sampling, step)
        assert not twins[1].sampler.matches.any()


@pytest.mark.cuda
@pytest.mark.parametrize("length", [21, 255, 4096, 60_000])
def test_matches_and_scores(length):
    vocab = 4099
    states = selftest_replies.states_of(vocab, length, CUDA)
    dry_match(states[1], torch.zeros(1, dtype=torch.int64, device=CUDA))
    assert torch.equal(states[1].matches.cpu().long(), repeated_lengths(states[0]))
    logits = torch.randn(vocab)
    scores = logits.cuda()
    adjust(scores, states[1])
    assert torch.equal(scores.cpu(), sampler.adjust(logits, states[0]))
    assert not states[1].matches.any()


@pytest.mark.cuda
def test_a_history_of_one_token_is_followed_no_further_than_the_longest():
    state = SamplerState(50, 60_000, CUDA)
    state.reset(Sampling(dry_multiplier=1.0), torch.full((60_000,), 7), 1)
    dry_match(state, torch.zeros(1, dtype=torch.int64, device=CUDA))
    assert state.matches.nonzero().flatten().tolist() == [7]
    assert int(state.matches[7]) == 50


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_damage_is_told_of_behind_a_mask(value):
    step = StepState(SamplerState(1000, 64, CUDA), CUDA)
    step.sampler.reset(Sampling(dry_multiplier=1.0), torch.tensor([1, 2, 1]), 5)
    step.sampler.allow(torch.tensor([1] + [0] * 31, dtype=torch.int32))
    logits = torch.randn(1000, device=CUDA)
    damaged = logits.clone()
    damaged[2] = value
    step.choose(damaged, greedy=True)
    assert int(step.chosen) == NON_FINITE
    step.choose(logits, greedy=True)
    assert int(step.chosen) == 0


def state_of(**changes: torch.Tensor) -> SamplerState:
    state = SamplerState(40, 8, CPU)
    state.dry = state.masked = True
    for name, tensor in changes.items():
        setattr(state, name, tensor)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"history": torch.zeros(9)}, "history is torch.float32"),
        ({"breakers": torch.zeros(39, dtype=torch.bool)}, "matches has shape"),
        ({"matches": torch.zeros(40)}, "matches is torch.float32"),
        ({"window": torch.zeros(2, dtype=torch.int64)}, "window has shape"),
        ({}, "history are on cpu, must be on a CUDA device"),
    ],
)
def test_wrong_arguments_of_dry_match_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dry_match(state_of(**change), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("logits", "softcap", "change", "message"),
    [
        (torch.zeros(40).half(), 0.0, {}, "logits is torch.float16"),
        (torch.zeros(39), 0.0, {}, "seen has shape"),
        (torch.zeros(80)[::2], 0.0, {}, "logits has strides"),
        (torch.zeros(40), -1.0, {}, "softcap = -1.0"),
        (torch.zeros(40), 0.0, {"masks": torch.zeros(1, 1, dtype=torch.int32)}, "mask has shape"),
        (torch.zeros(40), 0.0, {"penalties": torch.zeros(51).double()}, "penalties is torch.float64"),
        (torch.zeros(40), 0.0, {}, "logits are on cpu, must be on a CUDA device"),
    ],
)
def test_wrong_arguments_of_adjust_are_named(logits, softcap, change, message):
    with pytest.raises(ValueError, match=message):
        adjust(logits, state_of(**change), softcap=softcap)


def test_bytes_are_those_of_the_tensors():
    state, logits = state_of(), torch.zeros(40)
    assert dry_match_bytes(9) == state.history.nbytes
    assert adjust_bytes(40, dry=False) == 2 * logits.nbytes + state.seen.nbytes
    assert adjust_bytes(40, dry=True) == 2 * logits.nbytes + state.seen.nbytes + state.matches.nbytes
