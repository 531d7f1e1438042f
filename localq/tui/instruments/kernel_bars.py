"""Kernel times of a decode step: a bar for each operation, its share and bandwidth.

From `profile_step()`, taken while no reply runs. Below the bars: their sum compared with the measured step, the host
gap of a token, and during a reply the current time of a token.
"""

from __future__ import annotations

from typing import Any

from textual.content import Content

from localq.tui.instruments.instrument_facts import InstrumentFacts, Sample
from localq.tui.instruments.instrument_widget import UNKNOWN, Instrument, bar, line, words

CPU = "kernel times: GPU only"
NONE_YET = "not timed yet"
BAR_AT = 28  # cells before the bars


class KernelBars(Instrument):
    """The table; empty until a model is loaded."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        facts = self.facts
        if facts.loaded is None:
            return []
        title = ("Decode step", "bold")
        if facts.sample is None:
            why = (facts.untimed or NONE_YET) if facts.on_gpu else CPU
            return [line(width, title), *words(why, width)]
        lines = [*_head(facts, facts.sample, width), *rows(facts.sample.profile, self._gb_per_s(), width)]
        if facts.untimed:
            lines += words(f"profile failed: {facts.untimed}", width)
        return [*lines, *_foot(facts, facts.sample.profile, width)]

    def _gb_per_s(self) -> float | None:
        roof = self.facts.roof
        return roof.bandwidth.bytes_per_s / 1e9 if roof else None


def rows(profile: dict[str, Any], gb_per_s: float | None, width: int) -> list[Content]:
    """A line for each operation: µs, share of the sum, share of the bandwidth, and a bar."""
    total, most = profile["sum_us"], max((row["us"] for row in profile["rows"]), default=0.0)
    found = []
    for row in profile["rows"]:
        share = f"{100 * row['us'] / total:.0f}%" if total else UNKNOWN
        reached = f"{100 * row['gb_per_s'] / gb_per_s:.0f}%" if gb_per_s else UNKNOWN
        cells = f"{row['kernel']:<10}{row['us']:>8,.1f}{share:>4}{reached:>5} "
        drawn = bar(row["us"] / most if most else 0.0, width - BAR_AT).rstrip()
        found.append(line(width, cells, (drawn, "$primary")))
    return found


def age(seconds: float) -> str:
    """Age of a profile: "12 s ago", "3 min ago"."""
    return f"{seconds:.0f} s ago" if seconds < 90 else f"{seconds / 60:.0f} min ago"


def _head(facts: InstrumentFacts, sample: Sample, width: int) -> list[Content]:
    where = f", ctx {sample.profile['position']:,}, {age(facts.clock() - sample.at_s)}"
    return [
        line(width, ("Decode step", "bold"), where),
        line(width, (f"{'':<10}{'µs':>8}{'':>4}{'roof':>5}", "$text-muted")),
    ]


def _foot(facts: InstrumentFacts, profile: dict[str, Any], width: int) -> list[Content]:
    total, step, gap = profile["sum_us"], profile["step_us"], profile["host_gap_us"]
    share = f" = {100 * total / step:.0f}% of the step" if step else ""
    found = [
        line(width, f"{'kernels':<10}{total:>8,.1f}{share}"),
        line(width, f"{'step':<10}{step:>8,.1f}"),
        line(width, f"{'host gap':<10}{gap:>8,.1f}", (" per token", "$text-muted")),
    ]
    if facts.speed.now:
        took = 1e6 / facts.speed.now
        found.append(line(width, f"{'now':<10}{took:>8,.1f}", (" per token", "$text-muted")))
    return found
