"""A model with longrope turns short texts as it was trained, and a text that outgrows them as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.engine.scoring import Decode, Prefill
from localq.errors import LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine import step_stand_ins
from tests.support.engine.engine_runs import greedy_of, ids_of, prompt_of, steps_of
from tests.support.engine.longrope_models import CONTEXT, ORIGINAL, VOCAB, save_phi3
from tests.support.engine.scripted_constraint import Script

ANY = [set(range(VOCAB))] * 200
WEIGHTS = "of the test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A float32 phi3 of 256 positions whose pretraining had 64."""
    short, long = ([base + i * step for i in range(8)] for base, step in ((1, 0.1), (2, 0.5)))
    return save_phi3(tmp_path_factory.mktemp("phi3"), 64, short, long, torch.float32)


@pytest.fixture(scope="module")
def reference(folder) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def loaded_of(folder: Path, ctx: int = CONTEXT) -> LoadedModel:
    return load(open_model(folder), LoadOptions(device="cpu", dtype="float32", ctx=ctx))


@pytest.fixture
def loaded(folder) -> LoadedModel:
    return loaded_of(folder)


@pytest.fixture(params=["modules", "launches, one ahead"])
def engine(loaded, request, monkeypatch) -> Engine:
    """As on the CPU, and as on a GPU: fixed launches that read the tables, one launched before the host has read."""
    made = Engine(loaded, chunk=16)
    if request.param != "modules":
        step_stand_ins.install(monkeypatch)
        made._steps.fuse()
        made._steps.lookahead = 1
    return made


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        (1, 12), (20, 30), (20, ORIGINAL - 20 + 1),  # the last token of a reply is not fed: short to its end
        (20, ORIGINAL - 20 + 2), (50, 40), (ORIGINAL - 1, 9), (ORIGINAL, 9), (ORIGINAL + 1, 9), (150, 12),
    ],
)  # fmt: skip
def test_replies_are_those_of_transformers_on_both_sides_of_the_limit_and_across_it(engine, reference, prompt, count):
    ids = prompt_of(prompt, seed=prompt)
    expected = greedy_of(reference, ids, count)
    assert ids_of(engine, ids, max_tokens=count) == expected
    script = Script(*ANY[:count], vocab=VOCAB)
    assert ids_of(engine, ids, constraint=script, max_tokens=count) == expected
    for step in (2, 3, 7):  # free tokens between those with a mask, on both sides of the limit
        mixed = Script(*[ANY[0] if at % step == 0 else None for at in range(count)], vocab=VOCAB)
        assert ids_of(engine, ids, constraint=mixed, max_tokens=count) == expected


def test_the_two_lists_give_other_replies(loaded, reference, monkeypatch):
    """Else the other tests would compare nothing."""
    ids = prompt_of(150, seed=150)
    loaded.model.choose_length(1)
    monkeypatch.setattr(loaded.model, "choose_length", lambda length: False)
    assert ids_of(Engine(loaded), ids, max_tokens=12) != greedy_of(reference, ids, 12)


def test_turns_of_a_chat_share_the_cache_but_across_the_limit(engine, reference):
    prompt = prompt_of(30)
    first = ids_of(engine, prompt, max_tokens=10)
    second = [*prompt, *first, *prompt_of(8, seed=2)]
    steps = steps_of(engine, second, max_tokens=30)  # 48 tokens, and 30 that cross
    assert steps[-1].stats.cached_tokens == 39
    assert steps[-1].stats.prefilled_tokens == 48 - 39  # computing again is no prefill
    reply = [id for step in steps for id in step.ids]
    assert reply == greedy_of(reference, second, 30)
    third = [*second, *reply, *prompt_of(5, seed=3)]
    steps = steps_of(engine, third, max_tokens=6)
    assert steps[-1].stats.cached_tokens == 48 + 30 - 1
    assert [id for step in steps for id in step.ids] == greedy_of(reference, third, 6)
    steps = steps_of(engine, second, max_tokens=6)  # as after /regen: short again
    assert steps[-1].stats.cached_tokens == 0
    assert [id for step in steps for id in step.ids] == reply[:6]


def test_computing_again_shows_progress_and_can_be_cancelled(engine, reference):
    prompt = prompt_of(50)
    steps = steps_of(engine, prompt, max_tokens=40)
    again = [step.stats for step in steps if step.stats.phase == "prefill" and step.stats.generated_tokens]
    assert [(each.prefilled_tokens, each.prompt_tokens) for each in again] == [(16, 64), (32, 64), (48, 64), (64, 64)]
    asked = []

    def cancelled() -> bool:
        asked.append(engine.cached_tokens)
        return len(asked) > 4 and asked[-1] == 32  # in the middle

    engine = Engine(engine.model, chunk=16)
    steps = steps_of(engine, prompt, max_tokens=40, cancelled=cancelled)
    assert steps[-1].reason == "cancelled"
    assert engine.cached_tokens == 32
    for ids in (prompt, prompt_of(90, seed=4), prompt):
        assert ids_of(engine, ids, max_tokens=20) == greedy_of(reference, ids, 20)


@pytest.mark.parametrize(("length", "count"), [(30, 10), (50, 40), (100, 10)])
def test_a_snapshot_resumes_with_the_list_of_its_length(folder, engine, reference, tmp_path, length, count):
    prompt = prompt_of(length)
    reply = ids_of(engine, prompt, max_tokens=count)
    engine.save_cache(tmp_path / "1.kv", WEIGHTS)
    fresh = Engine(loaded_of(folder), chunk=16)
    assert fresh.restore_cache(tmp_path / "1.kv", WEIGHTS) == length + count - 1
    follow_up = [*prompt, *reply, *prompt_of(6, seed=5)]
    steps = steps_of(fresh, follow_up, max_tokens=8)
    assert steps[-1].stats.cached_tokens == length + count - 1
    assert [id for step in steps for id in step.ids] == greedy_of(reference, follow_up, 8)


def test_a_snapshot_of_part_of_a_long_text_is_not_taken_for_a_short_one(loaded, tmp_path):
    engine = Engine(loaded, chunk=16)
    steps_of(engine, prompt_of(100), cancelled=lambda: engine.cached_tokens >= 32)
    assert engine.cached_tokens == 32
    engine.save_cache(tmp_path / "1.kv", WEIGHTS)
    with pytest.raises(LocalqError, match="RoPE tables"):
        engine.restore_cache(tmp_path / "1.kv", WEIGHTS)
    steps = steps_of(engine, prompt_of(100), max_tokens=2)
    assert steps[-1].stats.cached_tokens == 32  # the cache is still what it was


def test_a_short_context_needs_the_short_list_only(folder, reference):
    model = loaded_of(folder, ctx=ORIGINAL)
    assert not model.model.length_switches
    prompt = prompt_of(40)
    assert ids_of(Engine(model), prompt, max_tokens=20) == greedy_of(reference, prompt, 20)


def test_evaluation_turns_a_window_as_transformers_does(loaded, reference):
    ids = prompt_of(60)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    for source in (Prefill(loaded, len(ids)), Decode(loaded, len(ids))):
        torch.testing.assert_close(source.logits(ids, 0), expected, rtol=0, atol=1e-4)


def test_switching_keeps_the_place_of_the_tables(loaded):
    model = loaded.model
    table, place = model.rotary_tables[0], model.rotary_tables[0].data_ptr()
    long = table.clone()
    assert model.choose_length(ORIGINAL)
    assert not model.choose_length(1)
    assert torch.equal(table[ORIGINAL:], long[ORIGINAL:])
    assert torch.equal(table[:ORIGINAL], model.config.rope_kinds[0].table(ORIGINAL, table.dtype, table.device))
    assert torch.equal(model.rotary_rows(40)[0], table[:40])
    assert torch.equal(model.rotary_rows(100)[0], long[:100])
    assert model.choose_length(ORIGINAL + 1)
    assert torch.equal(model.rotary_tables[0], long)
    assert model.rotary_tables[0].data_ptr() == place
    assert [model.same_tables_until(length) for length in (3, ORIGINAL, 65)] == [ORIGINAL, ORIGINAL, None]
