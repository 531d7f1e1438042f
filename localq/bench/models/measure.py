"""How an engine is timed: one reply for decode, one prompt for prefill, through the same calls that a chat makes.

What was timed is what the engine's `Stats` say: decode from the first token to the last, prefill from the request to
the end of its last pass. The tokens of the depth stay in the cache between repetitions, as a conversation's do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from localq.bench.conditions.power import Throttle
from localq.bench.models.plan import Case, TestPlan
from localq.engine.generate import Engine
from localq.errors import LocalqError
from localq.sampling import Sampling

CHECK_PROMPT, CHECK_TOKENS = 8, 32
OnRun = Callable[[str, Case], None]  # who, what: before every run


@dataclass(frozen=True)
class Run:
    """One run of a case: seconds of its tokens, seconds to the first token (None: not observed), and the ids."""

    seconds: float
    first_token_s: float | None = None
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """All runs of a case. joules: over all of them, None where the device does not tell; held_down: see `throttle`."""

    case: Case
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
        """The median."""
        return statistics.median(run.seconds for run in self.runs) / self.case.tokens

    @property
    def first_token_s(self) -> float | None:
        """The median time to the first token."""
        times = [run.first_token_s for run in self.runs if run.first_token_s is not None]
        return statistics.median(times) if times else None

    @property
    def joules_per_token(self) -> float | None:
        """Of the tokens that were timed."""
        return None if self.joules is None else self.joules / (len(self.runs) * self.case.tokens)


class Subject(Protocol):
    """Something that is timed; `repetition` counts from -1, the warm-up."""

    def run(self, case: Case, repetition: int) -> Run:
        """One run."""
        ...

    def can(self, case: Case) -> bool:
        """It can be timed on this case."""
        ...

    def metered(self, case: Case) -> bool:
        """The energy of a run is that of the tokens which are timed."""
        ...


class Meter(Protocol):
    """Joules since `start`, None where the device does not tell; see `energy`."""

    def start(self) -> None:
        """From here on."""
        ...

    def stop(self) -> float | None:
        """Until here."""
        ...


class EngineSubject:
    """An engine of localq."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self._seed = engine, seed

    def run(self, case: Case, repetition: int) -> Run:
        """See `Subject`. The prompt of a prefill run is new behind the depth, so that nothing of it is cached."""
        vocab = self.engine.model.vocab
        start = prompt(case.start, vocab, self._seed)
        if case.generate:
            return self._decode(start, case.generate)
        # The one token that must differ is the first; the chances of two equal draws are not taken.
        fresh = prompt(case.prompt, vocab, self._seed + 2 + repetition)
        fresh[0] = (start[0] + 2 + repetition if start else 1 + repetition) % vocab
        return self._prefill([*start, *fresh], None if repetition < 0 else case.prompt)

    def can(self, case: Case) -> bool:
        """Every case."""
        return True

    def metered(self, case: Case) -> bool:
        """Every case: the depth stays in the cache."""
        return True

    def _decode(self, start: list[int], generate: int) -> Run:
        steps = list(self.engine.generate(start, Sampling(), max_tokens=generate + 1))
        ids, stats = [id for step in steps for id in step.ids], steps[-1].stats
        if stats.generated_tokens != generate + 1:
            raise LocalqError("bench", f"the reply ended after {stats.generated_tokens} tokens", "Report this.")
        return Run(stats.decode_s, stats.time_to_first_token_s, tuple(ids))

    def _prefill(self, ids: list[int], count: int | None) -> Run:
        """`count`: the tokens that must be computed; None for the warm-up, which may find the depth cached or not."""
        stats = list(self.engine.generate(ids, Sampling(), max_tokens=1))[-1].stats
        if count is not None and stats.prefilled_tokens != count:
            why = f"{stats.prefilled_tokens} tokens were computed for a prompt of {count}"
            raise LocalqError("bench", why, "Report this as a bug.")
        return Run(stats.prefill_s, stats.time_to_first_token_s)


def prompt(count: int, vocab: int, seed: int) -> list[int]:
    """`count` random ids, the same for the same seed."""
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def measure(
    subjects: dict[str, Subject], plan: TestPlan, meter: Meter, limits: Throttle, on_run: OnRun
) -> dict[str, list[Measurement]]:
    """Every case on every subject: a warm-up each, then the repetitions in turn, so that a slow minute hits all alike.

    Energy is told only where one subject is measured alone, and does nothing else meanwhile.
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
            known = len(subjects) == 1 and subject.metered(case)
            results[name].append(Measurement(case, tuple(runs[name]), joules if known else None, held_down=held_down))
    return results


def greedy_ids(engine: Engine, seed: int) -> list[int]:
    """The tokens that correctness is judged by: `CHECK_TOKENS` behind `CHECK_PROMPT` random ones."""
    steps = engine.generate(prompt(CHECK_PROMPT, engine.model.vocab, seed), Sampling(), max_tokens=CHECK_TOKENS)
    return [id for step in steps for id in step.ids]


def common_prefix(ids: list[int], others: list[int]) -> int:
    """How many leading tokens agree."""
    count = 0
    for mine, theirs in zip(ids, others, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
