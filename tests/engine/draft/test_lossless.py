"""Replies with drafts are those of plain decoding, token by token: the small form of tests/tools/lossless_drafts.py."""

from __future__ import annotations

import pytest

from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import ids_of, prompt_of, steps_of
from tests.support.engine.lossless import SAMPLINGS, Oracle, PlainReplies, case_of, compare
from tests.support.engine.scripted_constraint import VOCAB, Script
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def other(checkpoint) -> LoadedModel:
    """The same model with a cache of its own."""
    return load(open_model(checkpoint), LoadOptions(device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def plain(loaded) -> PlainReplies:
    return PlainReplies(lambda: Engine(loaded))


@pytest.mark.parametrize("lookahead", [0, 1], ids=["in step", "ahead"])
@pytest.mark.parametrize("source", ["oracle", "lookup"])
def test_drafts_do_not_change_replies(plain, other, source, lookahead):
    drafting = Engine(other, draft_tokens=7)
    drafting._steps.lookahead = lookahead
    drafted = accepted = 0
    for number in range(2 * len(SAMPLINGS)):
        found = compare(plain, drafting, case_of(number + 100 * lookahead), source)
        drafted, accepted = drafted + found["drafted"], accepted + found["accepted"]
    assert drafted > accepted > 50


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> LoadedModel:
    """Windows of 16 tokens that slide."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("gemma3"), "gemma3_text", initializer_range=0.15,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return load(open_model(folder), LoadOptions(device="cpu", dtype="float32"))


@pytest.mark.parametrize("masked", [False, True])
def test_windows_slide_beneath_drafts_and_masks(windowed, masked):
    length = 330  # beyond a window and a pass
    prompt, ways = prompt_of(20), []
    for tokens in (0, 7):
        engine = Engine(windowed, draft_tokens=tokens)
        if tokens:
            engine._drafter = Oracle(ways[0], seed=1)
        constraint = Script(*[range(0, VOCAB, 2)] * (length + 1)) if masked else None
        ways.append(ids_of(engine, prompt, max_tokens=length, constraint=constraint, draft_tokens=tokens))
    assert ways[0] == ways[1]


@pytest.fixture(scope="module")
def latents(tmp_path_factory) -> tuple[LoadedModel, LoadedModel]:
    """A model that caches latents, twice."""
    folder = make_checkpoint(tmp_path_factory.mktemp("glm"), "glm4_moe_lite", initializer_range=0.15)
    options = LoadOptions(device="cpu", dtype="float32", draft_tokens=7)
    return load(open_model(folder), options), load(open_model(folder), options)


@pytest.mark.parametrize("source", ["oracle", "lookup"])
def test_drafts_over_latents_do_not_change_replies(latents, source):
    plain, drafting = PlainReplies(lambda: Engine(latents[0])), Engine(latents[1], draft_tokens=7)
    drafted = accepted = 0
    for number in range(2 * len(SAMPLINGS)):
        found = compare(plain, drafting, case_of(number), source)
        drafted, accepted = drafted + found["drafted"], accepted + found["accepted"]
    assert drafted > accepted > 50


def test_a_full_context_and_the_length_of_a_reply_end_drafts(loaded, other):
    for length in (loaded.ctx - 5, loaded.ctx - 1, loaded.ctx):
        prompt = prompt_of(length)
        expected = steps_of(Engine(loaded), prompt)
        engine = Engine(other, draft_tokens=7)
        ids = [id for step in expected for id in step.ids]
        engine._drafter = Oracle(ids, seed=length)
        found = steps_of(engine, prompt, draft_tokens=7)
        assert [id for step in found for id in step.ids] == ids
        assert found[-1].reason == expected[-1].reason == "context"


def test_statistics_count_steps_drafts_and_positions(other):
    prompt = prompt_of(9)
    engine = Engine(other, draft_tokens=7)
    ids = ids_of(engine, prompt, max_tokens=33)
    engine._drafter = Oracle(ids, seed=3)
    stats = steps_of(engine, prompt, max_tokens=33, draft_tokens=7)[-1].stats
    drafted, accepted = stats.drafted["oracle"], stats.accepted["oracle"]
    assert sum(stats.drafted_at) == drafted >= accepted == sum(stats.accepted_at)
    assert stats.decode_steps == 32 - accepted
    assert stats.tokens_per_step == pytest.approx(32 / stats.decode_steps)
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
    plain = steps_of(engine, prompt, max_tokens=33)[-1].stats
    assert (plain.decode_steps, plain.tokens_per_step, plain.drafted) == (32, 1.0, {})


def test_an_engine_without_drafts_takes_none(loaded):
    engine = Engine(loaded)
    assert steps_of(engine, [1, 2, 3] * 9, max_tokens=30, draft_tokens=7)[-1].stats.drafted == {}


def test_weights_that_no_kernel_takes_in_several_rows_are_decoded_in_one(loaded, monkeypatch):
    """As at a load on a GPU: the first pass of several rows is refused, before it is captured."""
    engine = Engine(loaded, draft_tokens=7)
    engine._steps.no_drafts = "a multi-token step failed (nf4_gemv: x has 2 rows)"
    engine._check_drafts()
    assert engine.notes[-1] == "speculative decoding is off: a multi-token step failed (nf4_gemv: x has 2 rows)"
    assert engine.draft_tokens == 0
    assert steps_of(engine, [1, 2, 3] * 9, max_tokens=30, draft_tokens=7)[-1].stats.drafted == {}
