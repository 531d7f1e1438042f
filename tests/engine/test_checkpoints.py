"""Going back in a text that cannot be cut: recurrent states and slid windows, by checkpoints in host memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from localq.engine import checkpoints
from localq.engine.cache import KVCache
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.errors import LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import GREEDY, prompt_of, steps_of
from tests.support.models.tiny_checkpoints import make_checkpoint

SIZE, CHUNK, WEIGHTS = 2**22, 7, "w" * 64  # bytes of more checkpoints than a test keeps
FIELDS = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 320,
    },
}  # fmt: skip
KINDS = ("qwen3_5_text", "nemotron_h", "gemma3_text", "gemma4_text", "lfm2", "llama", "glm4_moe_lite")
CUT = ("llama", "glm4_moe_lite")  # which keep every position, and need no checkpoints


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, LoadedModel]:
    """Two hybrids, one with windows, one whose last layers share the cache, and two that need no checkpoints."""
    found = {}
    for kind in KINDS:
        folder = make_checkpoint(
            tmp_path_factory.mktemp(kind),
            kind,
            dtype=torch.float32,
            **{"initializer_range": 0.15, **FIELDS.get(kind, {})},
        )
        found[kind] = load(open_model(folder), LoadOptions(device="cpu", dtype="float32"))
    return found


def engine_of(loaded: LoadedModel, size: int = SIZE) -> Engine:
    """A conversation of its own."""
    cache = KVCache(loaded.cache.layout, loaded.ctx, loaded.dtype, "cpu", 16, CHUNK)
    return Engine(replace(loaded, cache=cache, checkpoint_bytes=size), chunk=CHUNK)


def reply(engine: Engine, prompt: list[int], marks: tuple[int, ...] = (), tokens: int = 9) -> tuple[list[int], int]:
    """Its ids, and how many tokens of the prompt were not computed."""
    steps = steps_of(engine, prompt, max_tokens=tokens, marks=marks)
    return [id for step in steps for id in step.ids], steps[-1].stats.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_goes_on_from_the_end_of_the_reply(models, kind):
    engine, prompt = engine_of(models[kind], 0), prompt_of(70)
    first, _ = reply(engine, prompt)
    longer = [*prompt, *first, *prompt_of(11, seed=2)]
    assert reply(engine, longer) == (reply(engine_of(models[kind]), longer)[0], 70 + 9 - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_given_anew_from_before_its_prompt(models, kind):
    engine, prompt, marks = engine_of(models[kind]), prompt_of(170), (20, 160)
    first, _ = reply(engine, prompt, marks, 60)
    again = [*prompt[:165], *prompt_of(12, seed=1)]  # another way to begin the reply
    kept = 165 if kind in CUT else 160
    assert reply(engine, again, marks) == (reply(engine_of(models[kind]), again)[0], kept)
    edited = [*prompt[:50], *prompt_of(60, seed=2)]  # another message behind the system prompt
    kept = 50 if kind in CUT else 20
    assert reply(engine, edited, marks) == (reply(engine_of(models[kind]), edited)[0], kept)
    assert reply(engine, prompt, marks, 60)[0] == first


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_reply_is_worth_coming_back_to(models, kind):
    engine, prompt = engine_of(models[kind]), prompt_of(60)
    first, _ = reply(engine, prompt, (55,))
    second = [*prompt, *first, *prompt_of(60, seed=2)]
    reply(engine, second, (len(second) - 5,), 30)
    undone = [*prompt, *first, *prompt_of(40, seed=3)]  # the second message is another
    kept = 60 + 9 - (kind not in CUT)
    assert reply(engine, undone) == (reply(engine_of(models[kind]), undone)[0], kept)


@pytest.mark.parametrize("kind", KINDS)
def test_random_ways_through_a_conversation_give_what_is_computed_anew(models, kind):
    choose, engine = random.Random(5), engine_of(models[kind])
    text, kept = prompt_of(40), 0
    for turn in range(10):
        marks = (15, len(text) - 3)
        found, shared = reply(engine, text, marks, choose.randint(1, 20))
        assert found == reply(engine_of(models[kind], 0), text, tokens=len(found))[0], turn
        kept += shared
        text = [*text, *found] if choose.random() < 0.6 else text[: choose.randrange(16, len(text))]
        text = [*text, *prompt_of(choose.randint(1, 30), seed=turn)]
    assert kept > 100


def test_the_budget_holds_and_the_least_recently_used_leaves(models):
    engine = engine_of(models["qwen3_5_text"])
    prompt = prompt_of(80)
    reply(engine, prompt, (10, 20, 30), 1)
    kept = engine._text.checkpoints
    one = kept.bytes // len(kept.lengths)
    assert kept.lengths == [10, 20, 30, 80]
    assert one == sum(part.nbytes for state in engine.model.cache.states.values() for part in state)
    small = engine_of(models["qwen3_5_text"], 3 * one)
    reply(small, prompt, (10, 20, 30), 1)
    assert small._text.checkpoints.lengths == [20, 30, 80]
    reply(small, [*prompt[:25], *prompt_of(30, seed=1)], (40,), 1)
    assert small._text.checkpoints.lengths == [20, 40, 55]
    assert small._text.checkpoints.bytes == 3 * one
    none = engine_of(models["qwen3_5_text"], one - 1)
    reply(none, prompt, (10, 20, 30), 1)
    assert none._text.checkpoints.lengths == []


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma3_text", "lfm2"])
def test_the_first_token_does_not_wait_for_the_copy_behind_its_prompt(models, kind, monkeypatch):
    """Nor for host memory, which is allocated while the prompt is computed."""
    engine, prompt, seen = engine_of(models[kind]), prompt_of(70), list[str]()
    kept, allocated = engine._text.checkpoints, checkpoints._host_buffer
    monkeypatch.setattr(checkpoints, "_host_buffer", lambda part: seen.append("buffer") or allocated(part))
    save = kept.save
    monkeypatch.setattr(kept, "save", lambda tokens: seen.append(f"copy of {tokens}") or save(tokens))
    for step in engine.generate(prompt, GREEDY, max_tokens=3, marks=(30, 70)):
        seen += ["token"] * len(step.ids)
    buffers = len(kept._copies[70])
    expected = [*["buffer"] * buffers, "copy of 30", *["buffer"] * buffers, "token", "copy of 70", "token", "token"]
    assert seen[: len(expected)] == expected


def test_an_error_in_a_pass_leaves_no_state(models, monkeypatch):
    engine, prompt = engine_of(models["qwen3_5_text"]), prompt_of(60)
    reply(engine, prompt, (40,))
    longer = [*prompt, *prompt_of(30, seed=4)]
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.model.layers[2], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reply(engine, longer)
    assert reply(engine, longer) == (reply(engine_of(models["qwen3_5_text"]), longer)[0], 40)
    bare = engine_of(models["qwen3_5_text"], 0)
    reply(bare, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(bare.model.model.layers[2], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reply(bare, longer)
    assert reply(bare, longer) == (reply(engine_of(models["qwen3_5_text"]), longer)[0], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_that_is_stopped_in_the_middle_is_gone_on_from(models, kind):
    engine, prompt = engine_of(models[kind]), prompt_of(30)
    steps = engine.generate(prompt, GREEDY, max_tokens=40)
    taken = [id for _, step in zip(range(20), steps, strict=False) for id in step.ids]
    steps.close()
    longer = [*prompt, *taken, *prompt_of(9, seed=1)]
    assert reply(engine, longer) == (reply(engine_of(models[kind]), longer)[0], 30 + len(taken) - 1)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_a_state_has_read_ahead_is_in_the_text(models, lookahead):
    """On a GPU the step after a token is launched before the token is taken."""
    engine, prompt = engine_of(models["qwen3_5_text"]), prompt_of(30)
    free, _ = reply(engine_of(models["qwen3_5_text"]), prompt, tokens=20)
    engine._steps.lookahead = lookahead
    engine._steps.readback._slots = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    stop = free[6]
    steps = steps_of(engine, prompt, max_tokens=20, stop_ids=frozenset({stop}))
    assert steps[-1].reason == "stop"
    said = free[: free.index(stop)]
    assert [id for step in steps for id in step.ids] == said
    assert engine._text.ids == [*prompt, *said, *([stop] if lookahead else [])]
    longer = [*prompt, *said, stop, *prompt_of(9, seed=1)]
    assert reply(engine, longer) == (reply(engine_of(models["qwen3_5_text"]), longer)[0], 30 + len(said) + lookahead)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_a_snapshot_holds_the_states(models, tmp_path, kind):
    engine, prompt = engine_of(models[kind]), prompt_of(60)
    first, _ = reply(engine, prompt)
    engine.save_cache(tmp_path / "7.kv", WEIGHTS)
    later = engine_of(models[kind])
    reply(later, prompt_of(33, seed=8))
    assert later.restore_cache(tmp_path / "7.kv", WEIGHTS) == 68
    longer = [*prompt, *first, *prompt_of(9, seed=1)]
    assert reply(later, longer) == (reply(engine_of(models[kind]), longer)[0], 68)


def test_a_state_that_is_not_known_is_not_saved(models, tmp_path, monkeypatch):
    engine, prompt = engine_of(models["qwen3_5_text"]), prompt_of(60)
    reply(engine, prompt)
    monkeypatch.setattr(engine.model.model.layers[2], "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reply(engine, [*prompt, *prompt_of(30, seed=4)])
    with pytest.raises(LocalqError, match="the cache is empty"):
        engine.save_cache(tmp_path / "7.kv", WEIGHTS)
