"""Replies under a constraint, on the CPU: only what the mask allows, in the order of the calls, to its end."""

from __future__ import annotations

import pytest
import torch

from localq.engine.constraint import next_mask, only, unpack_mask
from localq.errors import LocalqError
from localq.planner.footprint import CPU_CHUNK
from localq.sampling import Sampling
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of, steps_of
from tests.support.engine.scripted_constraint import VOCAB, Script, mask_of

STOP = 7  # one that no reply here takes by itself


def test_bits_are_ids():
    mask = torch.tensor([0b101, -(2**31), 0], dtype=torch.int32)
    assert unpack_mask(mask, 70).nonzero().flatten().tolist() == [0, 2, 63]
    assert torch.equal(mask_of([0, 2, 63], 70), mask)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=5.0, seed=1)], ids=["greedy", "sampled"])
def test_a_reply_says_what_is_allowed_and_stops_behind_it(engine, sampling):
    script = Script({300}, {5, 6}, range(40, 60), {319}, {0})
    steps = steps_of(engine, prompt_of(30), sampling, constraint=script)
    ids = [id for step in steps for id in step.ids]
    assert [len(step.ids) for step in steps] == [0, 1, 1, 1, 1, 1, 0]
    assert ids == script.taken
    assert all(id in step for id, step in zip(ids, script.steps, strict=True))
    assert script.calls == [call for id in ids for call in ("mask", id)]
    assert steps[-1].reason == "stop"


def test_of_what_is_allowed_the_likeliest_is_taken(engine):
    prompt = prompt_of(20)
    free = ids_of(engine, prompt, max_tokens=6)
    assert ids_of(engine, prompt, max_tokens=6, constraint=Script(*[range(VOCAB)] * 9)) == free
    others = set(range(VOCAB)) - set(free)
    held = ids_of(engine, prompt, max_tokens=6, constraint=Script(*[others] * 9))
    assert len(held) == 6
    assert not set(held) & set(free)


def test_a_stop_id_ends_the_reply_and_is_not_accepted(engine):
    script = Script({11}, {STOP}, {12})
    steps = steps_of(engine, prompt_of(9), stop_ids=frozenset({STOP}), constraint=script)
    assert [id for step in steps for id in step.ids] == [11]
    assert script.calls == ["mask", 11, "mask"]
    assert steps[-1].reason == "stop"


LIKELY = Sampling(temperature=1.0, top_k=40, repeat_penalty=1.3, dry_multiplier=0.5, xtc_probability=0.5, seed=3)


@pytest.mark.parametrize("lookahead", [0, 1], ids=["in step", "ahead"])
@pytest.mark.parametrize("sampling", [GREEDY, LIKELY], ids=["greedy", "sampled"])
def test_tokens_that_are_free_are_those_of_a_free_reply_up_to_the_first_that_is_not(engine, sampling, lookahead):
    engine._steps.lookahead = lookahead  # the order of a GPU: a pass is launched before its token is known
    prompt = prompt_of(20)
    free = ids_of(engine, prompt, sampling, max_tokens=12)
    for before in range(6):
        script = Script(*[None] * before, {300}, {7}, *[None] * 10)
        held = ids_of(engine, prompt, sampling, max_tokens=12, constraint=script)
        assert held[:before] == free[:before]
        assert held[before : before + 2] == [300, 7]
        assert script.taken == held
        assert script.calls == [*held[:before], "mask", 300, "mask", *held[before + 1 :]]
        # what was forced is in the cache: the rest is what follows it in a prompt
        anew = ids_of(engine, [*prompt, *held[: before + 2]], max_tokens=10 - before)
        assert sampling is not GREEDY or held[before + 2 :] == anew


def test_the_mask_of_one_token():
    for token in (0, 31, 32, 300, VOCAB - 1):
        assert torch.equal(only(token, VOCAB), mask_of([token]))


@pytest.mark.parametrize(("count", "reason"), [(2, "length"), (3, "stop"), (4, "stop")])
def test_the_longest_reply_is_a_length_only_where_more_would_follow(engine, count, reason):
    script = Script({1}, {2}, {3})
    steps = steps_of(engine, prompt_of(9), max_tokens=count, constraint=script)
    assert steps[-1].reason == reason
    assert script.calls.count("mask") == min(count, 3)


def test_a_constraint_that_has_stopped_already_has_an_empty_reply(engine):
    steps = steps_of(engine, prompt_of(9), constraint=Script())
    assert [(step.ids, step.reason) for step in steps] == [((), "stop")]


def test_cancel_in_between(engine):
    prompt, script = prompt_of(CPU_CHUNK), Script(*[{id} for id in range(20, 90)])
    steps = steps_of(engine, prompt, cancelled=lambda: len(script.taken) == 3, constraint=script)
    assert [id for step in steps for id in step.ids] == [20, 21, 22]
    assert steps[-1].reason == "cancelled"
    assert script.calls == ["mask", 20, "mask", 21, "mask", 22]
    # what is in the cache is what was said: the next turn goes on from there as from anew
    follow_up = [*prompt, 20, 21, 22, 5]
    steps = steps_of(engine, follow_up, max_tokens=8)
    assert steps[-1].stats.cached_tokens == CPU_CHUNK + 2
    engine.model.cache.clear()
    assert [id for step in steps for id in step.ids] == ids_of(type(engine)(engine.model), follow_up, max_tokens=8)


def test_the_reply_after_is_free_again(engine):
    prompt = prompt_of(20)
    free = ids_of(engine, prompt, max_tokens=6)
    ids_of(engine, prompt, constraint=Script({3}, {4}))
    assert ids_of(engine, prompt, max_tokens=6) == free


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damage_is_found_behind_a_mask(engine, value):
    """The logit that is not finite is of a token that the mask forbids."""

    def damaged(module, arguments, logits):
        logits[0, 200] = value

    handle = engine.model.model.register_forward_hook(damaged)
    try:
        with pytest.raises(LocalqError, match="non-finite logits"):
            steps_of(engine, prompt_of(5), constraint=Script({3}))
    finally:
        handle.remove()


def test_a_mask_that_allows_nothing_is_an_error_with_a_way_out(engine):
    with pytest.raises(LocalqError, match="the grammar allows no next token") as caught:
        steps_of(engine, prompt_of(5), constraint=Script({3}, set()))
    assert caught.value.next_step


def test_bits_past_the_vocabulary_allow_nothing():
    script = Script({40, 63}, vocab=64)
    assert next_mask(script, 41)[1] != 0
    with pytest.raises(LocalqError, match="allows no next token"):
        next_mask(script, 40)


@pytest.mark.parametrize("vocab", [VOCAB + 32, VOCAB - 1 - 31])
def test_a_mask_of_another_vocabulary_is_refused(engine, vocab):
    with pytest.raises(ValueError, match=r"must be torch.int32 \(10,\)"):
        steps_of(engine, prompt_of(5), constraint=Script({3}, vocab=vocab))
