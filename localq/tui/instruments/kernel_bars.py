"""Where the time of a decode step goes: a bar for each operation, with its share and what it reaches of the bandwidth.

From `profile_step()`, sampled while no reply runs. Below the bars stand their sum, the step as it was measured in one
piece, so that the two can be compared, what the host adds to a token, and while a reply runs what a token takes now.
"""

from __future__ import annotations

from typing import Any

from textual.content import Content

from localq.tui.instruments.instrument_facts import InstrumentFacts, Sample
from localq.tui.instruments.instrument_widget import UNTOLD, Instrument, bar, line, words

CPU = "only the fused step of a GPU is timed, not the CPU's"
NONE_YET = "not timed yet"
BAR_AT = 28  # cells left of the bars


class KernelBars(Instrument):
    """A table; empty until a model is loaded."""

    def lines(self, width: int) -> list[Content]:
        """See `Instrument`."""
        facts = self.facts
        if facts.loaded is None:
            return []
        title = ("Decode step", "bold")
        if facts.sample is None:
            why = (facts.untimed or NONE_YET) if facts.on_gpu else CPU
            return [line(width, title), *words(why, width)]
        told = [*_head(facts, facts.sample, width), *rows(facts.sample.profile, self._gb_per_s(), width)]
        if facts.untimed:
            told += words(f"not timed again: {facts.untimed}", width)
        return [*told, *_foot(facts, facts.sample.profile, width)]

    def _gb_per_s(self) -> float | None:
        roof = self.facts.roof
        return roof.bandwidth.bytes_per_s / 1e9 if roof else None


def rows(profile: dict[str, Any], gb_per_s: float | None, width: int) -> list[Content]:
    """An operation a line: us, share of the sum, share of the bandwidth; the longest bar is the largest operation's."""
    total, most = profile["sum_us"], max((row["us"] for row in profile["rows"]), default=0.0)
    found = []
    for row in profile["rows"]:
        share = f"{100 * row['us'] / total:.0f}%" if total else UNTOLD
        reached = f"{100 * row['gb_per_s'] / gb_per_s:.0f}%" if gb_per_s else UNTOLD
        cells = f"{row['kernel']:<10}{row['us']:>8,.1f}{share:>4}{reached:>5} "
        drawn = bar(row["us"] / most if most else 0.0, width - BAR_AT).rstrip()
        found.append(line(width, cells, (drawn, "$primary")))
    return found


def age(seconds: float) -> str:
    """Of a sample: "12 s ago", "3 min ago"."""
    return f"{seconds:.0f} s ago" if seconds < 90 else f"{seconds / 60:.0f} min ago"


def _head(facts: InstrumentFacts, sample: Sample, width: int) -> list[Content]:
    where = f" at {sample.profile['position']:,}, {age(facts.clock() - sample.at_s)}"
    return [
        line(width, ("Decode step", "bold"), where),
        line(width, (f"{'':<10}{'us':>8}{'':>4}{'roof':>5}", "$text-muted")),
    ]


def _foot(facts: InstrumentFacts, profile: dict[str, Any], width: int) -> list[Content]:
    total, step, gap = profile["sum_us"], profile["step_us"], profile["host_gap_us"]
    off = f" {100 * (total / step - 1):+.1f}% of it" if step else ""
    found = [
        line(width, f"{'sum':<10}{total:>8,.1f}{off}"),
        line(width, f"{'step':<10}{step:>8,.1f}", (" measured whole", "$text-muted")),
        line(width, f"{'host gap':<10}{gap:>8,.1f}", (" a token", "$text-muted")),
    ]
    if facts.speed.now:
        took = 1e6 / facts.speed.now
        found.append(line(width, f"{'now':<10}{took:>8,.1f}", (" a token in all", "$text-muted")))
    return found
