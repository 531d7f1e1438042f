"""Timing of an engine: one reply for decode, one prompt for prefill, through the calls that a chat makes.

Times are those of the engine's `Stats`: decode from the first token to the last, prefill from the request to the end of
its last pass. The tokens of the depth stay in the cache between repetitions, like a conversation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from localq.bench.conditions.power import Throttle
from localq.bench.models.plan import BenchPlan, BenchTest
from localq.engine.generate import Engine
from localq.errors import LocalqError
from localq.sampling import Sampling

CHECK_PROMPT, CHECK_TOKENS = 8, 32
OnRun = Callable[[str, BenchTest], None]  # subject and case, before every run


@dataclass(frozen=True)
class Run:
    """One run of a case: seconds of its tokens, seconds to the first token (None: unknown), and the ids."""

    seconds: float
    first_token_s: float | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """All runs of a case; joules: of all of them, None where unknown; held_down: of `power.Throttle`."""

    case: BenchTest
    runs: tuple[Run, ...]
    joules: float | None = None
    extrapolated: bool = False
    held_down: dict[str, float] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        """tok/s of every run."""
        return [self.case.tokens / run.seconds for run in self.runs]

    @property
    def seconds_per_token(self) -> float:
        """The median seconds per token."""
        return statistics.median(run.seconds for run in self.runs) / self.case.tokens

    @property
    def first_token_s(self) -> float | None:
        """The median time to the first token."""
        times = [run.first_token_s for run in self.runs if run.first_token_s is not None]
        return statistics.median(times) if times else None

    @property
    def joules_per_token(self) -> float | None:
        """Joules per timed token."""
        return None if self.joules is None else self.joules / (len(self.runs) * self.case.tokens)


class Subject(Protocol):
    """An engine that is timed; `repetition` counts from -1, the warm-up."""

    def run(self, case: BenchTest, repetition: int) -> Run:
        """Run a case once."""
        ...

    def can(self, case: BenchTest) -> bool:
        """True where it can be timed on this case."""
        ...

    def is_metered(self, case: BenchTest) -> bool:
        """True where the energy of a run is that of its timed tokens."""
        ...


class Meter(Protocol):
    """An energy meter: joules since `start`, None where the device does not report them; see `conditions.power`."""

    def start(self) -> None:
        """Start counting."""
        ...

    def stop(self) -> float | None:
        """Return the joules since `start`."""
        ...


class EngineSubject:
    """localq's engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self._seed = engine, seed

    def run(self, case: BenchTest, repetition: int) -> Run:
        """Run a case; the prompt of a prefill run is new after the depth, so that none of it is cached."""
        vocab = self.engine.model.vocab
        start = prompt(case.start, vocab, self._seed)
        if case.generate:
            return self._decode(start, case.generate)
        # The first token must differ, so it is not left to chance.
        fresh = prompt(case.prompt, vocab, self._seed + 2 + repetition)
        fresh[0] = (start[0] + 2 + repetition if start else 1 + repetition) % vocab
        return self._prefill([*start, *fresh], None if repetition < 0 else case.prompt)

    def can(self, case: BenchTest) -> bool:
        """True for every case."""
        return True

    def is_metered(self, case: BenchTest) -> bool:
        """True for every case: the depth stays in the cache."""
        return True

    def _decode(self, start: list[int], generate: int) -> Run:
        steps = list(self.engine.generate(start, Sampling(), max_tokens=generate + 1))
        ids, stats = [id for step in steps for id in step.ids], steps[-1].stats
        if stats.generated_tokens != generate + 1:
            why = f"the reply ended after {stats.generated_tokens} tokens"
            raise LocalqError("bench", why, "Report this as a bug.")
        return Run(stats.decode_s, stats.time_to_first_token_s, tuple(ids))

    def _prefill(self, ids: list[int], count: int | None) -> Run:
        """Run a prefill of `count` new tokens; None for the warm-up, where the depth may be cached or not."""
        stats = list(self.engine.generate(ids, Sampling(), max_tokens=1))[-1].stats
        if count is not None and stats.prefilled_tokens != count:
            why = f"the engine processed {stats.prefilled_tokens} tokens for a {count}-token prompt"
            raise LocalqError("bench", why, "Report this as a bug.")
        return Run(stats.prefill_s, stats.time_to_first_token_s)


def prompt(count: int, vocab: int, seed: int) -> list[int]:
    """Return `count` random ids, determined by the seed."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def measure(
    subjects: dict[str, Subject], plan: BenchPlan, meter: Meter, limits: Throttle, on_run: OnRun
) -> dict[str, list[Measurement]]:
    """Run every case on every subject: a warm-up each, then the repetitions in turn, so that drift affects all alike.

    Energy is reported only for a single subject that does nothing else meanwhile.
    """
    results: dict[str, list[Measurement]] = {name: [] for name in subjects}
    for case in plan.cases:
        able = {name: subject for name, subject in subjects.items() if subject.can(case)}
        for name, subject in able.items():
            on_run(name, case)
            subject.run(case, -1)
        runs: dict[str, list[Run]] = {name: [] for name in able}
        limits.start()
        meter.start()
        for repetition in range(plan.repetitions):
            for name, subject in able.items():
                on_run(name, case)
                runs[name].append(subject.run(case, repetition))
        joules, held_down = meter.stop(), limits.stop()
        for name, subject in able.items():
            known = len(subjects) == 1 and subject.is_metered(case)
            results[name].append(Measurement(case, tuple(runs[name]), joules if known else None, held_down=held_down))
    return results


def greedy_ids(engine: Engine, seed: int) -> list[int]:
    """Return the tokens of the correctness check: `CHECK_TOKENS` after `CHECK_PROMPT` random ones."""
    steps = engine.generate(prompt(CHECK_PROMPT, engine.model.vocab, seed), Sampling(), max_tokens=CHECK_TOKENS)
    return [id for step in steps for id in step.ids]


def common_prefix(ids: list[int], others: list[int]) -> int:
    """Return the number of leading tokens that agree."""
    count = 0
    for mine, theirs in zip(ids, others, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
