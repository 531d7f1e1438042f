"""Replies on the CPU: what they are compared with, and what ends, interrupts or damages them."""

from __future__ import annotations

import itertools

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.planner.footprint import CPU_CHUNK
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from tests.support.engine.engine_runs import GREEDY, greedy_of, ids_of, prompt_of, steps_of

CONTEXT = 512


def test_greedy_equals_transformers(engine, reference):
    for length in (1, 17, CPU_CHUNK, 3 * CPU_CHUNK + 5):
        prompt = prompt_of(length, seed=length)
        assert ids_of(engine, prompt, max_tokens=24) == greedy_of(reference, prompt, 24)


def test_greedy_with_repetition_penalty_equals_transformers(engine, reference):
    prompt = prompt_of(20)
    plain = greedy_of(reference, prompt, 16)
    reference.generation_config.repetition_penalty = 1.8
    try:
        expected = greedy_of(reference, prompt, 16)
    finally:
        reference.generation_config.repetition_penalty = None
    assert expected != plain
    assert ids_of(engine, prompt, Sampling(repeat_penalty=1.8), max_tokens=16) == expected


def test_the_next_turn_computes_only_what_is_new(engine):
    prompt = prompt_of(70)
    first = ids_of(engine, prompt, max_tokens=9)
    follow_up = [*prompt, *first, *prompt_of(11, seed=2)]
    steps = steps_of(engine, follow_up, max_tokens=20)
    stats = steps[-1].stats
    # the last token of a reply is chosen but never fed, so its keys are not there yet
    assert stats.cached_tokens == 70 + 9 - 1
    assert stats.prefilled_tokens == len(follow_up) - 78
    again = Engine(engine.model)
    assert [id for step in steps for id in step.ids] == ids_of(again, follow_up, max_tokens=20)
    assert steps_of(again, follow_up, max_tokens=1)[-1].stats.prefilled_tokens == 1  # at least its last token


@pytest.mark.parametrize("shared", [0, 1, 35, 69])
def test_a_changed_prompt_keeps_the_common_prefix_only(engine, shared):
    prompt = prompt_of(70)
    ids_of(engine, prompt, max_tokens=5)
    changed = [*prompt[:shared], (prompt[shared] + 1) % 320, *prompt_of(30, seed=3)]
    steps = steps_of(engine, changed, max_tokens=12)
    assert steps[-1].stats.cached_tokens == shared
    assert [id for step in steps for id in step.ids] == ids_of(Engine(engine.model), changed, max_tokens=12)


def test_chunks_do_not_change_the_reply(loaded):
    prompt = prompt_of(150)
    replies = [ids_of(Engine(loaded, chunk=chunk), prompt, max_tokens=16) for chunk in (1, 7, 64, 150, 1000)]
    assert all(reply == replies[0] for reply in replies)


def test_seeds(engine):
    prompt = prompt_of(12)
    sampling = Sampling(temperature=1.2, top_p=0.95, seed=3)
    first = ids_of(engine, prompt, sampling, max_tokens=30)
    assert ids_of(engine, prompt, sampling, max_tokens=30) == first
    assert ids_of(engine, prompt, sampling, max_tokens=10) == first[:10]
    assert ids_of(engine, prompt, Sampling(temperature=1.2, top_p=0.95, seed=4), max_tokens=30) != first


def test_every_stop_id_stops_and_is_not_part_of_the_reply(engine):
    prompt = prompt_of(25)
    free = ids_of(engine, prompt, max_tokens=30)
    for stop in (free[3], free[11]):
        steps = steps_of(engine, prompt, stop_ids=frozenset({stop, 9999}), max_tokens=30)
        assert [id for step in steps for id in step.ids] == free[: free.index(stop)]
        assert steps[-1].reason == "stop"


def test_max_tokens(engine):
    steps = steps_of(engine, prompt_of(5), max_tokens=1)
    assert [len(step.ids) for step in steps] == [0, 1, 0]
    assert steps[-1].reason == "length"


@pytest.mark.parametrize("length", [CONTEXT - 6, CONTEXT])
def test_a_full_context_ends_the_reply(engine, reference, length):
    prompt = prompt_of(length)
    steps = steps_of(engine, prompt)
    ids = [id for step in steps for id in step.ids]
    assert steps[-1].reason == "context"
    assert ids == greedy_of(reference, prompt, CONTEXT - length + 1)
    assert steps[-1].stats.context_fill == 1.0
    assert engine.cached_tokens == CONTEXT


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts(engine):
    with pytest.raises(LocalqError, match=r"too long for the 512-token context \(513 tokens\)") as caught:
        engine.generate(prompt_of(CONTEXT + 1), GREEDY)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("prompt", [[], [320], [-1], [1, 2.0], [True], ["1"]])
def test_bad_prompts_are_refused(engine, prompt):
    with pytest.raises(LocalqError) as caught:
        engine.generate(prompt, GREEDY)
    assert caught.value.exit_code == ExitCode.USAGE


def test_bad_max_tokens_is_refused(engine):
    with pytest.raises(LocalqError, match="max_tokens"):
        engine.generate([1], GREEDY, max_tokens=0)


def test_cancel_during_prefill_and_decode(engine):
    prompt = prompt_of(3 * CPU_CHUNK)
    calls = itertools.count()
    steps = steps_of(engine, prompt, cancelled=lambda: next(calls) >= 2)
    assert steps[-1].reason == "cancelled"
    assert steps[-1].stats.prefilled_tokens == 2 * CPU_CHUNK == engine.cached_tokens
    calls = itertools.count()
    steps = steps_of(engine, prompt, cancelled=lambda: next(calls) >= 4, max_tokens=50)
    ids = [id for step in steps for id in step.ids]
    assert steps[-1].reason == "cancelled"
    assert 0 < len(ids) < 10
    assert ids == ids_of(Engine(engine.model), prompt, max_tokens=len(ids))


def test_walking_away_leaves_the_books_right(engine):
    prompt = prompt_of(100)
    expected = ids_of(Engine(engine.model), [*prompt, 7], max_tokens=10)
    for kept in (1, 2, 5):
        reply = engine.generate(prompt, GREEDY)
        for _ in range(2 + kept):
            next(reply)
        reply.close()
        steps = steps_of(engine, [*prompt, 7], max_tokens=10)
        assert steps[-1].stats.cached_tokens >= 100 - 1
        assert [id for step in steps for id in step.ids] == expected


def test_a_failing_pass_leaves_the_books_right(engine, monkeypatch):
    prompt = prompt_of(2 * CPU_CHUNK + 10)
    expected = ids_of(Engine(engine.model), prompt, max_tokens=10)
    engine.model.cache.clear()
    for failing_call in (1, 2, 3, 5):
        calls = itertools.count()

        def fail(module, arguments, at=failing_call, calls=calls):
            if next(calls) == at:
                raise RuntimeError("planted")

        handle = engine.model.model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            steps_of(engine, [*prompt[:-5], *prompt_of(5, seed=failing_call)], max_tokens=10)
        handle.remove()
        assert ids_of(engine, prompt, max_tokens=10) == expected


def test_stats_tell_the_truth(engine):
    engine = Engine(engine.model, chunk=64)
    steps = steps_of(engine, prompt_of(150), max_tokens=5)
    prefill, decode, done = steps[:3], steps[3:-1], steps[-1]
    assert [step.stats.prefilled_tokens for step in prefill] == [64, 128, 150]
    assert [step.stats.phase for step in steps] == ["prefill"] * 3 + ["decode"] * 5 + ["done"]
    assert [step.stats.generated_tokens for step in decode] == [1, 2, 3, 4, 5]
    assert [step.stats.context_used for step in decode] == [151, 152, 153, 154, 155]
    last = done.stats
    assert (last.prompt_tokens, last.context_size, last.generated_tokens) == (150, CONTEXT, 5)
    assert 0 < last.prefill_s <= last.time_to_first_token_s
    assert last.decode_s > 0
    assert last.tokens_per_s > 0


def test_non_finite_logits_end_the_reply_and_the_chat_goes_on(checkpoint):
    engine = Engine(load(open_model(checkpoint), LoadOptions(device="cpu", dtype="float32")))
    prompt = prompt_of(30)
    expected = ids_of(engine, prompt, max_tokens=8)
    head = engine.model.model.lm_head.weight.data
    poisoned = expected[4]
    embedding = engine.model.model.embed_tokens.weight.data
    healthy = embedding[poisoned].clone()
    embedding[poisoned] = float("nan")  # strikes when the fifth token is fed
    seen: list[int] = []
    with pytest.raises(LocalqError, match=r"non-finite logits at token \d") as caught:
        seen.extend(id for step in engine.generate(prompt, GREEDY, max_tokens=8) for id in step.ids)
    assert caught.value.exit_code == ExitCode.FAILURE
    assert seen == expected[: len(seen)]
    assert poisoned == seen[-1]
    embedding[poisoned] = healthy
    assert torch.isfinite(head).all()
    assert ids_of(engine, prompt, max_tokens=8) == expected


def test_only_the_fused_step_of_a_gpu_is_timed(engine):
    with pytest.raises(LocalqError, match="requires the fused decode step") as caught:
        engine.profile_step()
    assert caught.value.exit_code == ExitCode.NO_DEVICE
    assert not engine.graphs
    assert engine.notes == engine.model.notes
