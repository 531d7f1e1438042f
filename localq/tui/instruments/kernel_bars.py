"""Kernel times of a decode step: a bar for each operation, its time and its share of the bandwidth.

From `profile_step()`, taken while no reply runs. Operations of less than 2 % share one row.
"""

from __future__ import annotations

from typing import Any

from textual.content import Content

from localq.keymap import KEYS
from localq.tui.gauge import MUTED, falling, gauge
from localq.tui.instruments.instrument_facts import InstrumentFacts
from localq.tui.instruments.instrument_widget import Instrument, heading, line, words
from localq.tui.keys import active_key, first_key

TITLE = "Decode step"
NAME, TIME, SHARE = 10, 10, 6  # cells of a row, besides its bar
SMALL = 0.02  # of the sum: operations below this are one row
GOOD_SHARE = 0.7  # of the bandwidth


class KernelBars(Instrument):
    """The table; until a step is profiled the key that does it; nothing on the CPU."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        facts = self.facts
        if facts.loaded is None or not facts.on_gpu:
            return []
        if facts.sample is None and facts.untimed:
            return [heading(width, TITLE), *words(facts.untimed, width)]
        if facts.sample is None:
            return [heading(width, TITLE, ("timing the kernels" if facts.asked else self._how(), MUTED))]
        profile = facts.sample.profile
        top, peak = _top(profile, self._gb_per_s(), width)
        found = [top, *rows(profile, self._gb_per_s(), width)]
        if facts.untimed:
            found += words(f"profile failed: {facts.untimed}", width)
        return [*found, *_foot(facts, profile, peak, width)]

    def _how(self) -> str:
        """The key that takes a profile."""
        key = active_key(self.screen, "profile") if self.is_attached else first_key(KEYS["profile"])
        return f"{key}: time the kernels"

    def _gb_per_s(self) -> float | None:
        roof = self.facts.roof
        return roof.bandwidth.bytes_per_s / 1e9 if roof else None


def rows(profile: dict[str, Any], gb_per_s: float | None, width: int) -> list[Content]:
    """A line for each operation, in the order of the step: a bar, µs, and the share of the bandwidth if known."""
    total = profile["sum_us"]
    small = [row for row in profile["rows"] if row["us"] < SMALL * total]
    large = [row for row in profile["rows"] if row not in small]
    most = max((row["us"] for row in large), default=0.0)
    found = [_row(row["kernel"], row["us"], most, _reached(row, gb_per_s), width) for row in large]
    if small:
        found.append(_row("other", sum(row["us"] for row in small), most, None, width))
    return found


def _reached(row: dict[str, Any], gb_per_s: float | None) -> float | None:
    return row["gb_per_s"] / gb_per_s if gb_per_s else None


def _row(name: str, us: float, most: float, reached: float | None, width: int) -> Content:
    drawn = gauge(us / most if most else 0.0, max(0, width - NAME - TIME - SHARE), "$primary")
    share = "" if reached is None else f"{reached:.0%}"
    style = "" if reached is None else falling(reached, GOOD_SHARE)
    return line(width, f"{name:<{NAME}}", *drawn, f"{us:>{TIME - 3},.0f} µs", (f"{share:>{SHARE}}", style))


def age(seconds: float) -> str:
    """Age of a profile: "12 s ago", "3 min ago"."""
    return f"{seconds:.0f} s ago" if seconds < 90 else f"{seconds / 60:.0f} min ago"


def _top(profile: dict[str, Any], gb_per_s: float | None, width: int) -> tuple[Content, str]:
    """The heading, which says what the column of shares is of; and what it had no room for, to be said at the foot."""
    took = f"{profile['step_us'] / 1000:,.1f} ms", "bold"
    if not gb_per_s:
        return heading(width, TITLE, took), ""
    peak = f"{gb_per_s:,.0f} GB/s"
    whole = heading(width, TITLE, took, (f", % of {peak}", MUTED))
    if "…" not in whole.plain:
        return whole, ""
    return heading(width, TITLE, took, (", % of peak", MUTED)), f", peak {peak}"


def _foot(facts: InstrumentFacts, profile: dict[str, Any], peak: str, width: int) -> list[Content]:
    """The host's part, and when it was measured, in two lines."""
    assert facts.sample is not None
    when = f"{profile['position']:,} tokens, {age(facts.clock() - facts.sample.at_s)}"
    first = f"host gap {profile['host_gap_us']:,.1f} µs{peak}"
    return [line(width, (each, MUTED)) for each in (first, f"at {when}")]
