"""Drafts over recurrent layers: replies are those of plain decoding, and a text goes on from any token of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from localq.engine.cache import KVCache
from localq.engine.draft.drafter import Draft
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.engine.step.fused import FusedStep
from localq.engine.step.rows import StepBuffers
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine import step_stand_ins
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of, steps_of
from tests.support.engine.lossless import SAMPLINGS, Oracle, PlainReplies, case_of, compare
from tests.support.engine.scripted_constraint import VOCAB, Script
from tests.support.models.tiny_checkpoints import make_checkpoint

KINDS = ("qwen3_5_text", "qwen3_5_moe_text", "lfm2", "nemotron_h")
WEIGHTS = "w" * 64
PROMPT = prompt_of(30)


class Right(Oracle):
    """Drafts what plain decoding says next, as much as a step takes."""

    def engages(self) -> bool:
        return True

    def draft(self, most: int, forced: Sequence[int] = (), masked: bool = False) -> Draft:
        ids = tuple(self._reply[self._count : self._count + min(most, self._most)])
        return Draft(ids, "oracle", (("oracle", 0),) * len(ids))


@pytest.fixture(scope="module", params=KINDS)
def models(request, tmp_path_factory) -> tuple[LoadedModel, LoadedModel]:
    """The same hybrid twice, each with a cache of its own."""
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, initializer_range=0.15)
    options = LoadOptions(device="cpu", dtype="float32", draft_tokens=7)
    return load(open_model(folder), options), load(open_model(folder), options)


@pytest.fixture
def fused_models(models) -> tuple[LoadedModel, LoadedModel]:
    """The same, where kernels compute a step."""
    if models[0].model.no_kernel:
        pytest.skip(models[0].model.no_kernel)
    return models


def engine_of(loaded: LoadedModel, reply: Sequence[int] = (), ahead: int = 0, size: int = 0) -> Engine:
    """An engine over the cache of `loaded`, which drafts `reply`. size: bytes of checkpoints."""
    engine = Engine(replace(loaded, checkpoint_bytes=size), draft_tokens=7)
    engine._steps.lookahead, engine._drafter = ahead, Right(reply, 0)
    return engine


def cut(engine: Engine, count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The first `count` tokens of a reply, which is closed behind them."""
    ids: list[int] = []
    reply = engine.generate([*prompt], GREEDY, max_tokens=60, draft_tokens=7)
    for step in reply:
        ids += step.ids
        if len(ids) == count:
            reply.close()
    return ids


@pytest.fixture(scope="module")
def plain(models) -> PlainReplies:
    return PlainReplies(lambda: Engine(models[0]))


@pytest.mark.parametrize("source", ["oracle", "lookup"])
def test_drafts_do_not_change_replies(models, plain, source):
    drafting = Engine(models[1], draft_tokens=7)
    drafted = accepted = 0
    for number in range(2 * len(SAMPLINGS), 4 * len(SAMPLINGS)):  # look-up is right in some, and wrong in others
        drafting._steps.lookahead = number % 2
        found = compare(plain, drafting, case_of(number), source)
        drafted, accepted = drafted + found["drafted"], accepted + found["accepted"]
    assert drafted > accepted > 50


@pytest.mark.parametrize("ahead", [0, 1], ids=["in step", "ahead"])
def test_the_next_turn_goes_on_from_every_token_of_a_step_without_a_pass_over_the_text(models, ahead):
    free = ids_of(engine_of(models[0]), PROMPT, max_tokens=60)
    for count in (1, 2, 3, 5, 8, 9, 10, 16):
        drafting = engine_of(models[1], free, ahead)
        ids = cut(drafting, count)
        assert ids == free[:count]
        turn = [*PROMPT, *ids, *prompt_of(3, seed=count)]
        steps = steps_of(drafting, turn, max_tokens=6)
        assert steps[-1].stats.cached_tokens >= len(PROMPT) + count - 1, "only the last token may be computed again"
        assert [id for step in steps for id in step.ids] == ids_of(engine_of(models[0]), turn, max_tokens=6)


def test_a_reply_given_anew_begins_at_its_checkpoint(models):
    free = ids_of(engine_of(models[0]), PROMPT, max_tokens=60)
    drafting = engine_of(models[1], free, size=2**24)
    for count in (60, 5, 13, 60):
        steps = steps_of(drafting, PROMPT, max_tokens=count, marks=(20, 25), draft_tokens=7)
        assert [id for step in steps for id in step.ids] == free[:count]
    assert steps[-1].stats.cached_tokens == 25
    assert steps[-1].stats.accepted["oracle"] > 40


def test_the_end_of_a_reply_is_a_checkpoint_whatever_was_drafted_behind_it(models):
    free = ids_of(engine_of(models[0]), PROMPT, max_tokens=60)
    drafting = engine_of(models[1], free, size=2**24)
    cut(drafting, 11)
    assert drafting._text.checkpoints.lengths == [len(PROMPT) + 10]
    other = [*PROMPT, *free[:10], *prompt_of(40, seed=8)]
    ids_of(drafting, other, max_tokens=4)
    undone = [*PROMPT, *free[:10], *prompt_of(9, seed=9)]
    steps = steps_of(drafting, undone, max_tokens=6)
    assert steps[-1].stats.cached_tokens == len(PROMPT) + 10
    assert [id for step in steps for id in step.ids] == ids_of(engine_of(models[0]), undone, max_tokens=6)


def test_a_snapshot_amid_a_step_holds_the_state_of_its_tokens(models, tmp_path):
    free = ids_of(engine_of(models[0]), PROMPT, max_tokens=60)
    drafting = engine_of(models[1], free)
    cut(drafting, 12)
    drafting.save_cache(tmp_path / "1.kv", WEIGHTS)
    restored = engine_of(models[0])
    assert restored.restore_cache(tmp_path / "1.kv", WEIGHTS) == len(PROMPT) + 11
    turn = [*PROMPT, *free[:12]]
    steps = steps_of(restored, turn, max_tokens=8)
    assert steps[-1].stats.cached_tokens == len(PROMPT) + 11
    assert [id for step in steps for id in step.ids] == free[12:20]


def test_an_error_amid_a_reply_leaves_nothing_wrong_behind(models):
    free = ids_of(engine_of(models[0]), PROMPT, max_tokens=60)
    drafting = engine_of(models[1], free)
    forward, failing = drafting._steps._modules.forward, [2, 4]

    def fail(live: int, rows: int = 1) -> None:
        forward(live, rows)
        failing[0] -= 1
        if failing[0] == 0:
            raise RuntimeError("a device error")

    drafting._steps._modules.forward = fail
    with pytest.raises(RuntimeError, match="a device error"):
        ids_of(drafting, PROMPT, max_tokens=60, draft_tokens=7)
    assert ids_of(drafting, PROMPT, max_tokens=60, draft_tokens=7) == free


def test_a_pass_that_waited_for_a_mask_is_not_read_twice_where_none_is_needed(models):
    """Without drafts, too: what a grammar allows is free again behind tokens that it forces."""
    replies = []
    for ahead in (0, 1):
        engine = Engine(models[ahead])
        engine._steps.lookahead = ahead
        constraint = Script(*[None, {9}, {7}, None, None, range(0, VOCAB, 2)] * 5)
        replies.append(ids_of(engine, PROMPT, max_tokens=30, constraint=constraint))
    assert replies[0] == replies[1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ahead", [0, 1], ids=["in step", "ahead"])
def test_the_launches_of_a_gpu_give_the_same_replies(fused_models, ahead, masked, monkeypatch):
    """With the kernels' work done by torch: drafted tokens are replayed by the step behind them, whatever its rows."""
    step_stand_ins.install(monkeypatch)
    script: Callable[[], Script | None] = lambda: Script(*[range(0, VOCAB, 2)] * 41) if masked else None  # noqa: E731
    free = ids_of(engine_of(fused_models[0]), PROMPT, max_tokens=40, constraint=script())
    drafting = engine_of(fused_models[1], free, ahead)
    drafting._steps.fuse()
    for drafter in (Right(free, 0), Oracle(free, 1), Oracle(free, 2)):
        drafting._drafter = drafter
        steps = steps_of(drafting, PROMPT, max_tokens=40, constraint=script(), draft_tokens=7)
        assert [id for step in steps for id in step.ids] == free
        assert steps[-1].stats.accepted["oracle"] > 5
        turn = [*PROMPT, *free, *prompt_of(3, seed=4)]
        steps = steps_of(drafting, turn, max_tokens=6)
        assert steps[-1].stats.cached_tokens >= len(PROMPT) + 39
        assert [id for step in steps for id in step.ids] == ids_of(engine_of(fused_models[0]), turn, max_tokens=6)


def test_the_launches_go_on_from_every_token_of_a_step(fused_models, monkeypatch):
    step_stand_ins.install(monkeypatch)
    free = ids_of(engine_of(fused_models[0]), PROMPT, max_tokens=60)
    drafting = engine_of(fused_models[1], free, 1)
    drafting._steps.fuse()
    for count in (2, 3, 7, 9, 12):
        assert cut(drafting, count) == free[:count]
        turn = [*PROMPT, *free[:count], *prompt_of(3, seed=count)]
        steps = steps_of(drafting, turn, max_tokens=6)
        assert steps[-1].stats.cached_tokens >= len(PROMPT) + count - 1
        assert [id for step in steps for id in step.ids] == ids_of(engine_of(fused_models[0]), turn, max_tokens=6)


def test_drafts_are_no_longer_than_what_the_cache_keeps(models):
    layout, ctx = models[0].cache.layout, models[0].ctx
    for rows in (1, 2, 4):
        cache = KVCache(layout, ctx, models[0].dtype, "cpu", rows=rows)
        assert Engine(replace(models[0], cache=cache), draft_tokens=7).draft_tokens == rows - 1


def test_the_step_that_replays_is_built_only_where_states_are(fused_models, monkeypatch):
    step_stand_ins.install(monkeypatch)
    steps = Engine(fused_models[0], draft_tokens=3)._steps
    steps.fuse()
    assert sorted(steps._verifying) == [1, 2, 4]
    model, state = fused_models[0].model, steps.state
    plain = FusedStep(model, fused_models[0].cache, state, 1, StepBuffers(4))
    assert plain.launches(True)[-2].operation == "head", "a plain step knows nothing of drafts"
