"""What runs a step: modules, fused launches and graphs give one reply; DRY, XTC and masks in whole replies."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from localq.engine import profile
from localq.engine.generate import Engine
from localq.engine.step.fused import FusedStep
from localq.sampling import Sampling
from tests.support.engine import step_stand_ins
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of
from tests.support.engine.scripted_constraint import VOCAB, Script

PROMPT = prompt_of(20)
DRAW = Sampling(temperature=1.5, top_p=0.98, seed=3)
KINDS = {
    "greedy": GREEDY,
    "sampled": DRAW,
    "DRY": Sampling(dry_multiplier=2.0),
    "XTC": Sampling(temperature=1.5, xtc_probability=0.5, xtc_threshold=0.02, seed=3),
    "all": Sampling(temperature=1.5, xtc_probability=0.5, xtc_threshold=0.02, dry_multiplier=2.0, seed=3),
}


class Graphs:
    """Replays that run the launches, and are noted."""

    def __init__(self, step: FusedStep) -> None:
        self.step, self.replays = step, []

    def replay(self, greedy: bool) -> None:
        self.replays.append("greedy" if greedy else "sampled")
        self.step.run(greedy)

    def forward(self) -> None:
        self.replays.append("forward")
        self.step.forward()


@pytest.fixture
def as_on_a_gpu(engine, monkeypatch) -> Engine:
    """The engine of the CPU with a fused step, graphs, and a pass launched ahead."""
    step_stand_ins.install(monkeypatch)
    steps = engine._steps
    steps.fused = FusedStep(engine.model.model, engine.model.cache, steps.state)
    steps.graphs, steps.lookahead = Graphs(steps.fused), 1
    return engine


@pytest.mark.parametrize("before", [0, 1, 2, 7])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_only_tokens_with_a_mask_leave_the_graphs(as_on_a_gpu, loaded, kind, before):
    """As at the end of a thinking budget: free tokens, two that are forced, free tokens again."""
    replies = []
    for engine in (as_on_a_gpu, Engine(loaded)):
        constraint = Script(*[None] * before, {300}, {7}, *[None] * 9)
        replies.append(ids_of(engine, PROMPT, KINDS[kind], max_tokens=before + 10, constraint=constraint))
    assert replies[0] == replies[1]
    assert replies[0][before : before + 2] == [300, 7]
    replays = as_on_a_gpu._steps.graphs.replays
    # The two and the one behind them, whose pass is launched before the last is taken; the prompt's chooses the first.
    assert replays.count("forward") == (3 if before else 2)
    assert set(replays) == {kind, "forward"}


def script() -> Script:
    return Script(*[range(step % 7, VOCAB, 7) for step in range(12)])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_the_same_whatever_runs_its_steps(as_on_a_gpu, loaded, kind, masked):
    replies = []
    for engine in (as_on_a_gpu, Engine(loaded)):
        constraint = script() if masked else None
        replies.append(ids_of(engine, PROMPT, KINDS[kind], max_tokens=30, constraint=constraint))
        assert len(replies[-1]) == (12 if masked else 30)
    assert replies[0] == replies[1]
    replays = set(as_on_a_gpu._steps.graphs.replays)
    assert replays == ({kind} if kind in ("greedy", "sampled") and not masked else {"forward"})


def test_a_pass_is_launched_before_its_token_is_known_and_a_mask_asked_for_behind_it(as_on_a_gpu):
    constraint = script()
    as_on_a_gpu._steps.graphs.replays = constraint.calls
    ids = ids_of(as_on_a_gpu, PROMPT, constraint=constraint)
    assert constraint.calls == [
        "mask",
        *itertools.chain(*(["forward", id, "mask"] for id in ids[:-1])),
        "forward",
        ids[-1],
    ]


def test_without_more_to_come_no_pass_is_launched(as_on_a_gpu):
    ids_of(as_on_a_gpu, PROMPT, max_tokens=3, constraint=script())
    assert as_on_a_gpu._steps.graphs.replays == ["forward"] * 2


def repeats(ids: list[int], length: int = 3) -> bool:
    """Some `length` tokens in a row stand there twice."""
    runs = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
    return len(set(runs)) < len(runs)


def of_six_words(engine: Engine, sampling: Sampling, **more) -> list[int]:
    """A reply that can hardly help repeating itself."""
    return ids_of(engine, PROMPT, sampling, max_tokens=60, constraint=Script(*[range(6)] * 61), **more)


def test_dry_ends_a_loop_and_a_breaker_lets_it_be(engine):
    free, strict = of_six_words(engine, GREEDY), Sampling(dry_multiplier=100.0)
    assert repeats(free)
    assert not repeats(of_six_words(engine, strict))
    assert of_six_words(engine, strict, breakers=frozenset(range(VOCAB))) == free
    assert repeats(of_six_words(engine, Sampling(dry_multiplier=100.0, dry_penalty_last_n=8)))


def test_the_next_turn_counts_as_history_too(engine):
    first = ids_of(engine, PROMPT, max_tokens=12)
    again = [*PROMPT, *first, *PROMPT]
    strict = Sampling(dry_multiplier=100.0)
    assert ids_of(engine, again, strict, max_tokens=1) != first[:1]
    assert ids_of(engine, [*again, first[0]], strict, max_tokens=1) != first[1:2]


def test_xtc_is_of_the_seed_and_not_of_the_length(engine):
    long = ids_of(engine, PROMPT, KINDS["XTC"], max_tokens=30)
    assert ids_of(engine, PROMPT, KINDS["XTC"], max_tokens=30) == long
    assert ids_of(engine, PROMPT, KINDS["XTC"], max_tokens=10) == long[:10]
    assert ids_of(engine, PROMPT, Sampling(temperature=1.5, seed=3), max_tokens=30) != long


def test_warming_up_leaves_a_plain_choice(engine):
    steps = engine._steps
    with torch.inference_mode():
        steps.warm_up(torch.randn(VOCAB))
    assert steps.sampler.plain
    assert int(steps.sampler.step) == 0
    fresh = ids_of(Engine(engine.model), PROMPT, DRAW, max_tokens=9)
    engine._invalidate()
    assert ids_of(engine, PROMPT, DRAW, max_tokens=9) == fresh


def test_a_measured_step_has_the_plain_choice(as_on_a_gpu, monkeypatch):
    captured = []

    def graph(enqueue, device):
        captured.append(as_on_a_gpu._steps.sampler.plain)
        return SimpleNamespace(replay=enqueue)

    monkeypatch.setattr(profile, "_graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profile, "_back_to_back_us", lambda *_: 1 / 0)
    ids_of(as_on_a_gpu, PROMPT, KINDS["all"], max_tokens=3)
    assert not as_on_a_gpu._steps.sampler.plain
    with pytest.raises(ZeroDivisionError):
        as_on_a_gpu.profile_step()
    assert captured == [True]
