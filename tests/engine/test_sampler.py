"""The sampler keeps what transformers' processors keep, draws by seed, and never picks from non-finite logits."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from localq.engine.sampler import NON_FINITE, SamplerState, penalize, sample, sampling_weights
from localq.sampling import Sampling
from tests.support.engine.sampler_states import PROMPT, VOCAB, logits_of, state_of


def reference_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """f32 [vocab], 0 for dropped tokens: transformers' own chain, in the order of `generate`."""
    ids, scores = PROMPT[None], logits[None].clone()
    scores = RepetitionPenaltyLogitsProcessor(sampling.repeat_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores.softmax(-1)[0]


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=50),
    Sampling(temperature=1.3, top_p=0.9),
    Sampling(temperature=0.6, min_p=0.05),
    Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, repeat_penalty=1.3),
    Sampling(temperature=2.0, top_k=1),
    Sampling(temperature=1.0, top_p=0.001),
    Sampling(temperature=1.5, top_k=5000, repeat_penalty=0.8),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_keeps_what_transformers_keeps(sampling):
    for seed in range(5):
        logits, state = logits_of(seed), state_of(sampling)
        weights, ids = sampling_weights(penalize(logits, state), state)
        probabilities = torch.zeros(VOCAB, dtype=torch.float64)
        probabilities[ids] = weights / weights.sum()
        expected = reference_probabilities(logits, sampling)
        assert torch.equal(probabilities > 0, expected > 0)
        torch.testing.assert_close(probabilities.float(), expected, rtol=1e-4, atol=1e-7)


def test_draws_follow_the_probabilities():
    sampling = Sampling(temperature=1.0, top_k=4, seed=5)
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5, -9.0])
    state = SamplerState(6, 4000, torch.device("cpu"))
    state.reset(sampling, torch.tensor([0]), 4000)
    counts = torch.zeros(6)
    for _ in range(4000):
        token = sample(logits, state, greedy=False)
        counts[token] += 1
        state.step.add_(1)
    expected = logits.masked_fill(torch.tensor([False, False, False, True, False, True]), -torch.inf).softmax(0)
    # 4,000 draws: the standard deviation of a frequency is at most 0.008
    torch.testing.assert_close(counts / 4000, expected, rtol=0, atol=0.04)


def test_same_seed_same_draws_and_other_seed_others():
    def draws(seed: int | None) -> list[int]:
        state = state_of(Sampling(temperature=1.5, seed=seed), steps=20)
        drawn = []
        for step in range(20):
            token = sample(logits_of(step), state, greedy=False)
            state.advance(token)
            drawn.append(int(token))
        return drawn

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert draws(None) != draws(None)


def test_greedy_takes_the_first_of_equal_logits_and_obeys_the_penalty():
    logits = torch.zeros(VOCAB)
    logits[[11, 40, 41]] = 3.0
    assert int(sample(logits, state_of(Sampling()), greedy=True)) == 11
    assert int(sample(logits, state_of(Sampling(repeat_penalty=1.2)), greedy=True)) == 40
    negative = torch.full((VOCAB,), -5.0)
    negative[[3, 500]] = torch.tensor([-1.0, -1.5])
    assert int(sample(negative, state_of(Sampling(repeat_penalty=4.0)), greedy=True)) == 3
    assert int(sample(negative, state_of(Sampling(repeat_penalty=6.0)), greedy=True)) == 0


def test_equal_logits_are_ordered_by_id():
    logits = torch.ones(VOCAB)
    _, ids = sampling_weights(logits, state_of(Sampling(temperature=1.0)))
    assert torch.equal(ids, torch.arange(VOCAB))


def test_advance_marks_the_token_as_seen():
    state = state_of(Sampling(repeat_penalty=100.0))
    logits = torch.zeros(VOCAB)
    logits[[7, 8]] = torch.tensor([2.0, 1.0])
    first = sample(logits, state, greedy=True)
    state.advance(first)
    assert int(first) == 7
    assert int(sample(logits, state, greedy=True)) == 8
    assert int(state.step) == 1


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_are_reported(greedy, value):
    logits = logits_of(1)
    logits[700] = value
    assert int(sample(logits, state_of(Sampling(temperature=0.0 if greedy else 1.0)), greedy)) == NON_FINITE


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 100.0])
def test_extreme_temperatures_stay_in_range(temperature):
    logits = logits_of(2)
    token = int(sample(logits, state_of(Sampling(temperature=temperature, seed=1)), greedy=False))
    assert 0 <= token < VOCAB
    if temperature < 1:
        assert token == int(logits.argmax())


def test_reset_forgets_the_reply_before():
    state = state_of(Sampling(temperature=1.0, top_k=3, repeat_penalty=1.5, seed=1))
    state.advance(torch.tensor([42]))
    state.reset(Sampling(), PROMPT, 5)
    assert not state.seen[42]
    assert state.seen.sum() == 4
    assert int(state.step) == 0
    assert int(state.top_k) == VOCAB


@pytest.mark.cuda
def test_cuda_draws_the_same_tokens():
    sampling = Sampling(temperature=0.9, top_k=60, top_p=0.97, min_p=0.001, repeat_penalty=1.1, seed=9)
    here, there = state_of(sampling, 50), SamplerState(VOCAB, 64, torch.device("cuda"))
    there.reset(sampling, PROMPT, 50)
    for step in range(50):
        logits = logits_of(step)
        expected, got = sample(logits, here, False), sample(logits.cuda(), there, False)
        here.advance(expected)
        there.advance(got)
        assert int(got) == int(expected)
