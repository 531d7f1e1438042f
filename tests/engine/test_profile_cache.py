"""What a measurement leaves of the conversation in the cache: the step's launches by stand-ins, graphs that just run.

That graphs do the same on a GPU is checked by `test_engine_on_cuda.py`.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from localq.engine import profile
from localq.engine.generate import Engine
from localq.engine.profile import REPLAYS, STEADY
from localq.engine.step.fused import FusedStep
from tests.support.engine import step_stand_ins
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of

CONTEXT = 512  # of the checkpoint


class Event:
    """An event of a device that takes no time."""

    def __init__(self, **_: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1.0


@contextlib.contextmanager
def no_records(**_: object):
    yield SimpleNamespace(events=lambda: [])


@pytest.fixture
def fused(engine, monkeypatch) -> Engine:
    """The engine of the CPU with a fused step whose "graphs" run the launches when they are replayed."""
    step_stand_ins.install(monkeypatch)
    monkeypatch.setattr(profile, "_graph", lambda enqueue, device: SimpleNamespace(replay=enqueue))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", no_records)
    engine._steps.fused = FusedStep(engine.model.model, engine.model.cache, engine._steps.state)
    return engine


def slots(engine: Engine) -> list[torch.Tensor]:
    return [*engine.model.cache.keys, *engine.model.cache.values]


@pytest.mark.parametrize(
    ("cached", "position", "keep", "at", "left"),
    [
        (60, None, True, 60, 60),
        (60, 20, True, 20, 20),
        (60, 200, True, 200, 60),
        (60, 200, False, 200, 0),
        (0, None, True, 0, 0),
        (500, None, True, CONTEXT - STEADY - REPLAYS, CONTEXT - STEADY - REPLAYS),  # no room behind it
    ],
)
def test_what_lies_before_the_step_stays_and_nothing_else(fused, cached, position, keep, at, left):
    for buffer in slots(fused):
        buffer.fill_(7.0)  # left by a longer conversation
    prompt = prompt_of(cached + 1, seed=4)
    ids_of(fused, prompt, max_tokens=1)
    before = [buffer.clone() for buffer in slots(fused)]
    fused._text.ids = prompt[:cached]
    found = fused.profile_step(position, keep=keep)
    assert (found.position, found.timer, fused.cached_tokens) == (at, "events", left)
    for buffer, was in zip(slots(fused), before, strict=True):
        assert torch.equal(buffer[:, :left], was[:, :left])
        assert not buffer[:, left:].any()


def test_the_next_reply_shares_what_was_cached_and_is_the_same(fused):
    prompt = prompt_of(70)
    follow_up = [*prompt, *ids_of(fused, prompt, max_tokens=9), *prompt_of(11, seed=2)]
    expected = ids_of(fused, follow_up, max_tokens=12)
    fused._invalidate()
    ids_of(fused, prompt, max_tokens=9)
    fused.profile_step()
    steps = list(fused.generate(follow_up, GREEDY, max_tokens=12))
    assert steps[-1].stats.cached_tokens == 70 + 9 - 1
    assert [id for step in steps for id in step.ids] == expected


def test_a_measurement_that_fails_leaves_the_same(fused, monkeypatch):
    prompt = prompt_of(40)
    ids_of(fused, prompt, max_tokens=1)
    before = [buffer[:, :40].clone() for buffer in slots(fused)]
    monkeypatch.setattr(profile, "_by_events", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fused.profile_step()
    assert fused.cached_tokens == 40
    for buffer, was in zip(slots(fused), before, strict=True):
        assert torch.equal(buffer[:, :40], was)
        assert not buffer[:, 40:].any()
