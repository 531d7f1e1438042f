"""The tests of a benchmark: prefill and decode at a depth, named as in llama-bench. No torch.

`-p 512,2048 -n 128 -d 0,4096` means six tests: pp512, pp2048 and tg128, each after 0 and after 4096 cached tokens. A
test of 0 tokens is skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from localq.errors import usage_error
from localq.wording import parse_count

PROMPT, GENERATE, REPETITIONS = 512, 128, 5
MOST_CASES, MOST_POSITIONS = 200, 2**24  # limits on the number of tests and on the tokens of one
RIVALS = ("transformers", "bitsandbytes")
CONTEXT_STEP = 64  # contexts are multiples of it


@dataclass(frozen=True)
class BenchTest:
    """One test: `prompt` tokens of prefill or `generate` tokens of decode (the other is 0), after `depth` tokens."""

    prompt: int
    generate: int
    depth: int

    @property
    def name(self) -> str:
        """The name as in llama-bench: "tg128", "pp512 @ d4096"."""
        test = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return f"{test} @ d{self.depth}" if self.depth else test

    @property
    def tokens(self) -> int:
        """The number of timed tokens."""
        return self.prompt or self.generate

    @property
    def start(self) -> int:
        """Cached positions when the clock starts; decode needs at least one token."""
        return self.depth if self.prompt else max(self.depth, 1)

    @property
    def positions(self) -> int:
        """Cache positions that the test needs."""
        return self.start + self.tokens + 1


@dataclass(frozen=True)
class BenchPlan:
    """The tests of a run, and their repetitions after one warm-up; results are medians."""

    cases: tuple[BenchTest, ...]
    repetitions: int = REPETITIONS
    seed: int = 0

    @property
    def positions(self) -> int:
        """Cache positions that the longest test needs."""
        return max(case.positions for case in self.cases)

    @property
    def ctx(self) -> int:
        """The smallest context length, a multiple of `CONTEXT_STEP`, that fits every test."""
        return -(-self.positions // CONTEXT_STEP) * CONTEXT_STEP

    @property
    def headline(self) -> BenchTest:
        """The test of the headline: the first decode test, else the first."""
        return next((case for case in self.cases if case.generate), self.cases[0])


def make(prompt: str, generate: str, depth: str, repetitions: int = REPETITIONS, seed: int = 0) -> BenchPlan:
    """Parse the options of the command line. Raises LocalqError (exit 2)."""
    prompts, generates = _counts("-p", prompt), _counts("-n", generate)
    cases = []
    for deep in _counts("-d", depth):
        cases += [BenchTest(count, 0, deep) for count in prompts if count]
        cases += [BenchTest(0, count, deep) for count in generates if count]
    if not cases:
        raise usage_error(
            "bench", "-p 0 -n 0 leaves nothing to measure", "Set at least one of them to a value above 0."
        )
    if short := next((case for case in cases if case.generate == 1), None):
        raise usage_error("-n", f"{short.name} is too short to time", "Use 2 or more tokens.")
    plan = BenchPlan(tuple(dict.fromkeys(cases)), repetitions, seed)
    if len(plan.cases) > MOST_CASES or plan.positions > MOST_POSITIONS:
        why = f"{len(plan.cases):,} tests of up to {plan.positions:,} tokens exceed the limit"
        step = f"Use at most {MOST_CASES} tests of up to {MOST_POSITIONS:,} tokens each."
        raise usage_error("bench", why, step)
    return plan


def rivals(words: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """Parse `--against`: engines to compare with, comma-separated; "none" = no engine.

    Raises LocalqError (exit 2) as `check_rivals` does.
    """
    names = [name for word in words for name in word.split(",")] or default
    named = tuple(dict.fromkeys(name for name in names if name != "none"))
    check_rivals("--against", named)
    return named


def check_rivals(subject: str, names: Sequence[str]) -> None:
    """Raise LocalqError (exit 2) for an engine that is unknown or not installed."""
    for name in names:
        if name not in RIVALS:
            raise usage_error(subject, f"unknown engine {name!r}", f"Use {', '.join(RIVALS)} or none.")
        if importlib.util.find_spec(name) is None:
            raise usage_error(subject, f"{name} is not installed", f"Install it: `pip install {name}`.")


def _counts(option: str, text: str) -> list[int]:
    try:
        counts = [parse_count(part) for part in text.split(",")]
    except ValueError:
        why = f"{text[:40]!r} is not a list of token counts"
        raise usage_error(option, why, "Use a value such as 512 or 128,512,4k.") from None
    if any(count < 0 for count in counts):
        raise usage_error(option, f"{text!r} contains a negative count", "Use 0 or more.")
    return counts
