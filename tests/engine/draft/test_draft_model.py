"""Replies that a draft model drafts are those of plain decoding; its cache follows the text; its time counts."""

from __future__ import annotations

import time

import pytest
import torch

from localq.engine.draft import drafter as drafters
from localq.engine.draft.drafter import Drafter
from localq.engine.generate import Engine
from localq.engine.load.draft import load_draft
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.planner import draft_cost
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from tests.support.engine.draft_models import KINDS, OPTIONS, engine_with, new_drafter, save_draft
from tests.support.engine.engine_runs import ids_of, prompt_of, steps_of
from tests.support.engine.longrope_models import ORIGINAL, save_phi3
from tests.support.engine.lossless import SAMPLINGS, EagerTimes, PlainReplies, case_of, compare


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory) -> dict[str, Engine]:
    folder = tmp_path_factory.mktemp("drafts")
    return {kind: engine_with(checkpoint, save_draft(kind, checkpoint, folder / kind)) for kind in KINDS}


@pytest.fixture
def drafting(engines) -> Engine:
    """The target drafts for itself, whenever it can."""
    return eager(engines["same"])


def eager(engine: Engine) -> Engine:
    engine._drafter = new_drafter(engine)
    engine._drafter.times = EagerTimes()
    return engine


@pytest.fixture(scope="module")
def plain(loaded) -> PlainReplies:
    return PlainReplies(lambda: Engine(loaded))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_model_does_not_change_replies(plain, engines, kind):
    drafted = accepted = 0
    for number in range(len(SAMPLINGS)):
        engines[kind]._steps.lookahead = number % 2
        found = compare(plain, engines[kind], case_of(number + 300), "model")
        drafted, accepted = drafted + found["drafted"], accepted + found["accepted"]
    assert drafted > accepted


def test_a_model_with_the_weights_of_the_target_drafts_what_that_says(drafting):
    prompt = prompt_of(40)
    plain = ids_of(drafting, prompt, max_tokens=90)
    steps = steps_of(drafting, prompt, max_tokens=90, draft_tokens=7)
    stats = steps[-1].stats
    assert [id for step in steps for id in step.ids] == plain
    assert stats.accepted == stats.drafted
    assert stats.drafted["model"] > 60
    assert stats.tokens_per_step > 5


def test_a_model_with_similar_weights_is_right_at_times(engines):
    stats = steps_of(eager(engines["near"]), prompt_of(40), max_tokens=200, draft_tokens=3)[-1].stats
    assert stats.drafted["model"] > stats.accepted["model"] > 0


def test_a_reply_that_asks_for_no_model_gets_look_up_alone(drafting):
    stats = steps_of(drafting, [1, 2, 3] * 9, max_tokens=40, draft_tokens=7, ask_draft_model=False)[-1].stats
    assert "model" not in stats.drafted


def test_look_up_comes_first_where_it_is_as_good(drafting):
    """A reply that repeats itself: the model would be right as often, but takes time."""
    drafting._drafter.times.drafting = lambda tokens: 0.05 * tokens
    prompt = prompt_of(9)
    reply = ids_of(drafting, prompt, max_tokens=60)
    stats = steps_of(drafting, [*prompt, *reply, *prompt], max_tokens=60, draft_tokens=7)[-1].stats
    plain = ids_of(drafting, [*prompt, *reply, *prompt], max_tokens=60)
    if plain == reply:
        assert stats.drafted["lookup"] > stats.drafted.get("model", 0)


# ---- its cache


def passes_of(engine: Engine, monkeypatch) -> list[int]:
    """The tokens of every pass of the draft model that is not a step, from now on."""
    model, found = engine._draft_model, []
    run = model._pass

    def count(ids, first):
        found.append(len(ids))
        return run(ids, first)

    monkeypatch.setattr(model, "_pass", count)
    return found


def test_the_cache_is_cut_to_what_was_accepted_and_read_on_from_there(engines, monkeypatch):
    engine = eager(engines["near"])
    model, passes = engine._draft_model, passes_of(engine, monkeypatch)
    prompt = prompt_of(50)
    reply = ids_of(engine, prompt, max_tokens=80, draft_tokens=7)
    assert sum(passes) <= len(prompt) + 8  # what follows is read by steps
    text = [*prompt, *reply]
    shared = model._agreed
    assert model._text.ids[:shared] == text[:shared]
    keys = [layer.k[:, :shared].clone() for layer in model.model.cache.kv_layers.values()]
    model._clear()
    with torch.inference_mode():
        model._pass(text[:shared], 0)
    for found, expected in zip(
        keys, (layer.k[:, :shared] for layer in model.model.cache.kv_layers.values()), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_another_version_of_a_reply_and_an_edited_message_share_what_they_can(drafting, monkeypatch):
    prompt = prompt_of(120)
    ids_of(drafting, prompt, max_tokens=30, draft_tokens=7)
    passes = passes_of(drafting, monkeypatch)
    ids_of(drafting, prompt, Sampling(temperature=1.0, seed=3), max_tokens=30, draft_tokens=7)
    assert sum(passes) < 30
    passes.clear()
    ids_of(drafting, [*prompt[:100], *prompt_of(10, seed=5)], max_tokens=30, draft_tokens=7)
    assert sum(passes) < 30


def test_nothing_is_read_before_a_draft_is_made(drafting, monkeypatch):
    passes = passes_of(drafting, monkeypatch)
    ids_of(drafting, prompt_of(100, seed=4), max_tokens=20)
    assert not passes


def test_a_full_context_of_the_draft_model_ends_its_drafts(loaded, engines):
    engine, prompt = eager(engines["short"]), prompt_of(20)
    steps = steps_of(engine, prompt, max_tokens=120, draft_tokens=7)
    assert [id for step in steps for id in step.ids] == ids_of(Engine(loaded), prompt, max_tokens=120)
    assert engine._draft_model.room(range(64)) == 1
    assert engine._draft_model.room(range(65)) == 0
    assert engine._draft_model.model.ctx == 64


def test_logits_that_are_not_finite_end_the_drafts_and_not_the_reply(loaded, checkpoint, tmp_path):
    engine = eager(engine_with(checkpoint, save_draft("wrong", checkpoint, tmp_path / "wrong")))
    engine._draft_model.model.model.norm.weight.data.fill_(float("nan"))
    prompt = prompt_of(30)
    steps = steps_of(engine, prompt, max_tokens=40, draft_tokens=7)
    assert [id for step in steps for id in step.ids] == ids_of(Engine(loaded), prompt, max_tokens=40)
    assert engine._draft_model.room(prompt) == 0


def test_a_draft_model_with_longrope_changes_its_tables_with_the_text(checkpoint, tmp_path):
    short, long = ([base + i * step for i in range(8)] for base, step in ((1, 0.1), (2, 0.5)))
    files = open_model(save_phi3(tmp_path / "phi3", 64, short, long, torch.float32))
    model = load(files, OPTIONS, draft=files)
    engine = eager(Engine(model, draft_tokens=7, draft=load_draft(files, model, OPTIONS, lambda *report: None)))
    prompt = prompt_of(ORIGINAL - 20, vocab=model.vocab)
    plain = ids_of(engine, prompt, max_tokens=60)
    steps = steps_of(engine, prompt, max_tokens=60, draft_tokens=7)
    assert [id for step in steps for id in step.ids] == plain
    assert sum(steps[-1].stats.accepted.values()) > 30


# ---- its time


class SlowModel:
    """Drafts `reply`, with one wrong token in `wrong`; a token takes `seconds`."""

    source = "model"
    share = 0.1

    def __init__(self, reply: list[int], seconds: float, wrong: int = 10**9) -> None:
        self.reply, self.seconds, self.wrong, self.asked = reply, seconds, wrong, []

    def begin(self, prompt):
        self.start = len(prompt)

    def missed(self, ids):
        return 0

    def room(self, ids):
        return 100

    def propose(self, ids, count):
        self.asked.append((len(ids), count))
        place = len(ids) - self.start
        found = [id if (place + n) % self.wrong else -id for n, id in enumerate(self.reply[place : place + count], 1)]
        return drafters.Proposal(found, 0.0, count * self.seconds)


def decode(model: SlowModel, one: float = 1.0, several: float = 1.3) -> tuple[int, float]:
    """Steps and seconds of a reply; a pass of one row takes `one` seconds, of more rows `several`."""
    drafter, prompt = Drafter(model), [10**6]
    drafter.begin(prompt)
    place, steps, seconds = 0, 0, 0.0
    while place < len(model.reply):
        draft = drafter.draft(min(7, len(model.reply) - place - 1))
        accepted = 0
        while accepted < len(draft) and draft.ids[accepted] == model.reply[place + accepted]:
            accepted += 1
        if draft:
            drafter.record(draft, accepted)
        took = one if not draft else several
        drafter.times.record(1 if not draft else 2 if len(draft) == 1 else 4 if len(draft) <= 3 else 8, took)
        for count, token in enumerate(model.reply[place : place + accepted + 1]):
            drafter.push(token, drafted=count < len(draft))
        place, steps, seconds = place + accepted + 1, steps + 1, seconds + took + draft.seconds
    return steps, seconds


REPLY = [1000 + count for count in range(1500)]


def test_a_cheap_model_that_is_right_drafts_all_the_time():
    steps, seconds = decode(SlowModel(REPLY, 0.05))
    assert seconds < 0.4 * len(REPLY)
    assert steps < 0.3 * len(REPLY)


def test_a_model_that_costs_more_than_it_gains_is_left_alone_but_for_trials():
    model = SlowModel(REPLY, 0.9)
    _, seconds = decode(model)
    assert seconds < 1.03 * len(REPLY)
    model = SlowModel(REPLY, 0.3, wrong=1)
    _, seconds = decode(model)
    assert seconds < 1.03 * len(REPLY)
    assert 2 < len(model.asked) < 60


def test_drafts_come_back_when_the_model_is_right_again():
    model = SlowModel(REPLY, 0.05, wrong=1)
    drafter_steps = []
    ask = model.propose

    def propose(ids, count):
        if len(ids) > 500:
            model.wrong = 10**9
        drafter_steps.append((len(ids), count))
        return ask(ids, count)

    model.propose = propose
    decode(model)
    late = [count for place, count in drafter_steps if place > 1000]
    assert max(count for place, count in drafter_steps if 200 < place < 500) == 1
    assert sum(late) > 300


def test_a_pass_of_one_row_is_timed_now_and_then():
    for wrong in (10**9, 9):  # drafts that are accepted as a whole, and such that are not
        model = SlowModel(REPLY, 0.01, wrong)
        steps, _ = decode(model)
        assert steps - len(model.asked) in range(3, 6 + len(model.asked) // drafters.REFERENCE)
        assert steps - len(model.asked) > 2 + len(model.asked) // (2 * drafters.REFERENCE)


def test_drafts_go_on_after_such_a_pass_where_passes_are_launched_ahead():
    drafter = Drafter(SlowModel(REPLY, 0.01))
    drafter.begin([10**6])
    for _ in range(3):
        drafter.times.record(1, 1.0)
    for place in range(0, 400, 4):
        if not drafter.engages():
            break
        draft = drafter.draft(3)
        drafter.record(draft, len(draft))
        for count, token in enumerate(REPLY[place : place + len(draft) + 1]):
            drafter.push(token, drafted=count < len(draft))
    assert place == 4 * drafters.REFERENCE
    drafter.push(REPLY[place])  # of a pass that was launched ahead
    assert drafter.engages()


def test_the_time_of_a_draft_is_not_that_of_the_pass(drafting, monkeypatch):
    model, recorded = drafting._draft_model, []
    ask = model.propose

    def slowly(ids, count):
        time.sleep(0.05)
        found = ask(ids, count)
        return found._replace(drafting_s=found.drafting_s + 0.05)

    monkeypatch.setattr(model, "propose", slowly)
    monkeypatch.setattr(drafting._drafter.times, "record", lambda rows, seconds: recorded.append((rows, seconds)))
    steps_of(drafting, prompt_of(30), max_tokens=40, draft_tokens=7)
    assert min(seconds for rows, seconds in recorded if rows > 1) < 0.045


def test_a_token_that_the_constraint_refuses_counts_as_a_wrong_one():
    drafter = Drafter(SlowModel(REPLY, 0.01))
    draft = drafters.Draft((1, 2, 3), "model", (("model", 1),) * 3)
    before = drafter.acceptance.of(("model", 1))
    for _ in range(5):
        drafter.record(draft.cut(0), 0)
    assert drafter.acceptance.of(("model", 1)) < before


# ---- its memory


@pytest.mark.parametrize("kind", ["same", "wrong", "short", "windowed"])
def test_the_plan_counts_a_draft_model(engines, kind):
    engine = engines[kind]
    planned, ledger = engine.model.plan.ledger.components, engine.ledger()
    for part in draft_cost.COMPONENTS:
        assert ledger[part] == pytest.approx(planned[part], rel=0.02, abs=40_000)  # (the sampler has a margin)
    assert ledger["draft_weights"] == planned["draft_weights"]
    assert ledger["draft_kv_cache"] == planned["draft_kv_cache"]


def test_without_drafts_no_draft_model_is_planned_or_loaded(checkpoint):
    files, options = open_model(checkpoint), LoadOptions(device="cpu", dtype="float32")
    model = load(files, options, draft=files)
    assert model.plan.draft is None
    assert load_draft(files, model, options, lambda *report: None) is None
    assert not any(model.plan.ledger.components[part] for part in draft_cost.COMPONENTS)
