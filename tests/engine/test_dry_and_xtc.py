"""What DRY and XTC make less likely or leave out, what a mask forbids, and settings within their limits."""

from __future__ import annotations

import pytest
import torch

from localq.engine.constraint import mask_words
from localq.engine.sampler import SamplerState, adjust, repeated_lengths, sample, sampling_weights
from localq.errors import LocalqError
from localq.sampling import LONGEST_MATCH, Sampling
from tests.support.engine.sampler_states import PROMPT, VOCAB, logits_of, state_of

# ---- DRY


def lengths_of(history: list[int], breakers: list[int] = (), last_n: int = -1, vocab: int = 60) -> dict[int, int]:
    """Id -> length of the repetition that it would go on with; the last three tokens come as the reply."""
    state = SamplerState(vocab, 256, torch.device("cpu"))
    cut = max(1, len(history) - 3)
    sampling = Sampling(dry_multiplier=1.0, dry_penalty_last_n=last_n)
    state.reset(sampling, torch.tensor(history[:cut]), 20, breakers)
    for token in history[cut:]:
        state.advance(torch.tensor([token]))
    lengths = repeated_lengths(state)
    return {id: int(lengths[id]) for id in lengths.nonzero().flatten().tolist()}


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([5], {}),
        ([5, 5], {5: 1}),
        ([1, 2, 3, 4], {}),
        ([1, 2, 3, 9, 1, 2, 3], {9: 3}),
        ([1, 2, 3, 9, 7, 2, 3], {9: 2}),
        ([2, 3, 8, 1, 2, 3, 9, 1, 2, 3], {8: 2, 9: 3}),  # the first has no more in front of it
        ([4, 3, 8, 1, 2, 3, 8, 6, 1, 2, 3], {8: 3}),  # the longer one counts
        ([7, 7, 7, 7], {7: 3}),  # a repetition may overlap itself
        ([1, 2, 1, 2, 1], {2: 3}),
    ],
)
def test_repetitions_by_hand(history, expected):
    assert lengths_of(history) == expected


def test_breakers_end_repetitions_and_are_not_penalized():
    history = [1, 2, 3, 4, 9, 1, 2, 3, 4]
    assert lengths_of(history) == {9: 4}
    assert lengths_of(history, breakers=[2]) == {9: 2}
    assert lengths_of(history, breakers=[1, 57, 5000, -3]) == {9: 3}  # no such id breaks nothing
    assert lengths_of(history, breakers=[4]) == {}
    assert lengths_of(history, breakers=[9]) == {}


def test_only_the_last_tokens_are_looked_at():
    history = [1, 2, 3, 9, 8, 1, 2, 3]
    assert [lengths_of(history, last_n=n) for n in (8, 7, 6, 5, 4, 1)] == [{9: 3}, {9: 2}, {9: 1}, {}, {}, {}]


def test_a_repetition_is_followed_for_fifty_tokens():
    assert lengths_of([*range(1, 50), 0, *range(1, 50)]) == {0: 49}
    assert lengths_of([*range(1, 56), 0, *range(1, 56)]) == {0: LONGEST_MATCH}


@pytest.mark.parametrize(("multiplier", "base", "allowed"), [(0.8, 1.75, 2), (1.5, 2.0, 1), (3.0, 1.0, 4)])
@pytest.mark.parametrize("repeated", [1, 2, 3, 4, 6])
def test_a_repetition_of_n_costs_exactly_multiplier_times_base_to_the_n_beyond(multiplier, base, allowed, repeated):
    run = torch.arange(100, 100 + repeated)
    prompt = torch.cat((run, torch.tensor([500, 600]), run))
    sampling = Sampling(dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed)
    state = state_of(Sampling())
    state.reset(sampling, prompt, 5)
    logits = logits_of(1)
    penalty = multiplier * base ** (repeated - allowed) if repeated >= allowed else 0.0
    expected = logits.clone()
    expected[500] -= torch.tensor(penalty, dtype=torch.float64).float()
    assert torch.equal(adjust(logits, state), expected)


def test_the_repetition_penalty_comes_before_dry():
    state = state_of(Sampling())
    sampling = Sampling(repeat_penalty=2.0, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    state.reset(sampling, torch.tensor([7, 8, 9, 7, 8]), 5)
    logits = torch.full((VOCAB,), 6.0)
    logits[8] = -6.0
    scores = adjust(logits, state)
    assert scores[[7, 8, 9, 10]].tolist() == [3.0, -12.0, 3.0 - 2.0, 6.0]


def test_dry_has_an_effect_on_greedy_and_grows_with_the_reply():
    """What the model says alone: 1 2 3 1 2 3 ..., of which DRY lets two tokens pass before it costs more than 5."""
    likely = {1: 2, 2: 3, 3: 1}
    state = SamplerState(10, 64, torch.device("cpu"))
    state.reset(Sampling(dry_multiplier=4.0, dry_base=2.0), torch.tensor([1, 2, 3, 1]), 20)
    reply, last = [], 1
    for _ in range(3):
        logits = torch.zeros(10)
        logits[likely[last]], logits[7] = 5.0, 0.5
        token = sample(logits, state, greedy=True)
        state.advance(token)
        last = int(token)
        reply.append(last)
    assert reply == [2, 3, 7]  # a repetition of 1, of 2 (4.0 off 5.0), of 3 (8.0 off)


def test_what_a_mask_forbids_stays_below_the_heaviest_penalty():
    state = SamplerState(VOCAB, 256, torch.device("cpu"))
    sampling = Sampling(temperature=100.0, seed=1, dry_multiplier=100.0, dry_base=10.0, dry_allowed_length=1)
    run = torch.arange(100, 160)
    state.reset(sampling, torch.cat((run, torch.tensor([500]), run)), 5)
    mask = torch.zeros(mask_words(VOCAB), dtype=torch.int32)
    mask[500 // 32] = 1 << 500 % 32
    state.allow(mask)
    for greedy in (True, False):
        assert int(sample(logits_of(1), state, greedy)) == 500


# ---- XTC


def xtc_state(threshold: float, probability: float = 1.0, **settings) -> SamplerState:
    state = SamplerState(6, 64, torch.device("cpu"))
    sampling = Sampling(temperature=1.0, xtc_probability=probability, xtc_threshold=threshold, seed=1, **settings)
    state.reset(sampling, torch.tensor([0]), 64)
    return state


PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.03, 0.12])  # by falling probability: 1 3 5 2 0 4


@pytest.mark.parametrize(
    ("threshold", "settings", "stay"),
    [
        (0.5, {}, {0, 1, 2, 3, 4, 5}),  # none reaches it
        (0.35, {}, {0, 1, 2, 3, 4, 5}),  # one does, and it is the least likely of them
        (0.25, {}, {0, 2, 3, 4, 5}),
        (0.11, {}, {0, 2, 4, 5}),
        (0.02, {}, {4}),
        (0.11, {"top_k": 3}, {5}),  # of 0.82: 0.49, 0.37, 0.146
        (0.15, {"top_k": 3}, {3, 5}),
        (0.13, {"top_p": 0.9}, {2, 5}),  # of 0.92: 0.435, 0.326, 0.13043, 0.109
        (0.105, {"min_p": 0.2}, {2}),  # of 0.92: the last of four is 0.1087
    ],
)
def test_xtc_leaves_the_least_likely_of_what_reaches_the_threshold(threshold, settings, stay):
    weights, ids = sampling_weights(PROBABILITIES.log(), xtc_state(threshold, **settings))
    assert set(ids[weights > 0].tolist()) == stay
    left = PROBABILITIES[sorted(stay)].double()
    got = weights[ids.argsort()][sorted(stay)]
    torch.testing.assert_close(got / got.sum(), left / left.sum())


def test_of_equal_probabilities_the_last_stays():
    weights, ids = sampling_weights(torch.zeros(6), xtc_state(0.1))
    assert ids[weights > 0].tolist() == [5]


def test_xtc_acts_as_often_as_its_probability_says():
    state = SamplerState(6, 4000, torch.device("cpu"))
    state.reset(Sampling(temperature=1.0, xtc_probability=0.3, seed=2), torch.tensor([0]), 4000)
    assert abs(float(state.excludes.double().mean()) - 0.3) < 0.03  # the standard deviation is 0.0073
    kept = [sampling_weights(PROBABILITIES.log(), state)[0] for _ in range(3)]
    acts = bool(state.excludes[0])
    assert all(bool(weights[0] == 0) == acts for weights in kept)


def test_without_xtc_a_seed_draws_what_it_always_drew_and_with_it_the_length_does_not_matter():
    plain, short, long = (SamplerState(6, 64, torch.device("cpu")) for _ in range(3))
    plain.reset(Sampling(temperature=1.0, seed=1), torch.tensor([0]), 9)
    expected = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(plain.uniforms[:9], expected)
    for state, steps in ((short, 9), (long, 64)):
        state.reset(Sampling(temperature=1.0, seed=1, xtc_probability=0.5), torch.tensor([0]), steps)
    assert torch.equal(short.uniforms[:9], long.uniforms[:9])
    assert torch.equal(short.excludes[:9], long.excludes[:9])
    assert long.excludes.any()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(repeat_penalty=1.2, temperature=1.0, xtc_threshold=0.2, dry_base=2.0),
        Sampling(dry_multiplier=1.0, dry_penalty_last_n=0),
        Sampling(xtc_probability=0.5),  # greedy
    ],
)
def test_what_is_off_is_plain(sampling):
    state = state_of(Sampling(temperature=1.0, dry_multiplier=1.0, xtc_probability=0.5))
    assert (state.dry, state.xtc, state.plain) == (True, True, False)
    state.reset(sampling, PROMPT, 5)
    assert state.plain


LIMITS = {
    "dry_multiplier": ([0.0, 100.0], [-0.1, 101.0, float("nan")]),
    "dry_base": ([1.0, 10.0], [0.9, 10.5, float("nan")]),
    "dry_allowed_length": ([1, LONGEST_MATCH], [0, LONGEST_MATCH + 1]),
    "dry_penalty_last_n": ([-1, 0, 10**9], [-2]),
    "xtc_probability": ([0.0, 1.0], [-0.1, 1.1, float("nan")]),
    "xtc_threshold": ([0.001, 0.5], [0.0, 0.51, float("nan")]),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name):
    good, bad = LIMITS[name]
    for value in good:
        state_of(Sampling(temperature=1.0, **{"dry_multiplier": 1.0, "xtc_probability": 0.5, name: value}))
    for value in bad:
        with pytest.raises(LocalqError, match=name):
            Sampling(**{name: value})
