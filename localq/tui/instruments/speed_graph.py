"""Decode speed of a reply (its last 4 minutes) as a curve over the whole width, and its share of what the card's
bandwidth allows.

The axis begins at 0 and ends at a round figure, the first that is not below the highest speed; both are labelled. The
area below the curve has one tone: two would be read as two quantities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from textual.content import Content

from localq.stats import Stats
from localq.tui.gauge import MUTED, Part, falling
from localq.tui.instruments.instrument_facts import InstrumentFacts, Slice
from localq.tui.instruments.instrument_widget import (
    LOW_GRAPH,
    NO_SOURCE,
    Instrument,
    figure,
    heading,
    line,
    meter,
    words,
)
from localq.wording import human_bytes

ROWS, LOW_ROWS = 4, 2  # of the graph; where room is short
CURVE = "$primary"
ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)  # ends of the axis, times a power of ten
EIGHTHS = " ▁▂▃▄▅▆▇█"
AXIS = 5  # cells left of the graph
GOOD_SHARE = 0.6  # of the limit
GOOD_ACCEPTANCE = 0.5
LEAST_S = 0.3  # of the last slice: a shorter one says little
NO_ROOF_CARD = "bandwidth share unknown; run `localq fit` to measure this card"


class SpeedGraph(Instrument):
    """The speed, its curve, and the limit as a gauge."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        facts = self.facts
        if facts.loaded is None:
            return [heading(width, "Speed", ("no model loaded", MUTED))]
        curve = facts.speed.curve
        found = [heading(width, "Speed", *_figures(facts))]
        if curve or self.compact:
            rows = LOW_ROWS if self.dropped >= LOW_GRAPH else ROWS
            found += graph([each.tokens_per_s for each in _whole(curve)], max(0, width - AXIS), width, rows)
        if facts.roof is not None:
            found.append(_limit(facts, width))
        if facts.speed.last.drafted and not self.compact:
            found.append(_drafts(facts.speed.last, width))
        is_short = self.compact or self.dropped >= NO_SOURCE
        return found if is_short else [*found, *words(explanation(facts), width)]


def rate_and_roof(facts: InstrumentFacts) -> tuple[float, float]:
    """(steps/s, roofline): current values during a reply, else the mean of the last one, at its middle.

    A step gives a token, and with drafts several.
    """
    speed, roof = facts.speed, facts.roof
    used, is_now = speed.last.context_used, speed.running and speed.now > 0
    if not is_now:
        used -= speed.last.generated_tokens // 2
    rate = speed.now if is_now else speed.last.tokens_per_s
    per_step = speed.last.tokens_per_step if speed.last.drafted else 1.0
    return rate / per_step, roof.tokens_per_s(max(0, used)) if roof else 0.0


def explanation(facts: InstrumentFacts) -> str:
    """Return the source of the limit, or how to learn it; "" on the CPU, which has none."""
    if facts.loaded is None or not facts.on_gpu:
        return ""
    if facts.roof is None:
        return NO_ROOF_CARD if facts.loaded.reads else ""
    gb_per_s, source = facts.roof.bandwidth.bytes_per_s / 1e9, facts.roof.bandwidth.source
    moved = human_bytes(facts.roof.reads.at(facts.speed.last.context_used))
    return f"{gb_per_s:,.0f} GB/s ({source}), {moved} a token"


def _figures(facts: InstrumentFacts) -> list[Part]:
    speed = facts.speed
    rate = speed.now if speed.running and speed.now else speed.last.tokens_per_s
    if rate:
        return [(figure(rate), "bold $text-primary"), (" tok/s", "")]
    return [("processing the prompt" if speed.running else "no reply yet", MUTED)]


def _limit(facts: InstrumentFacts, width: int) -> Content:
    rate, roof = rate_and_roof(facts)
    share = rate / roof if roof else 0.0
    style = falling(share, GOOD_SHARE)
    value: list[str | Part] = [(f"{share:.0%}", f"bold {style}"), f" of {figure(roof)}"] if rate else [figure(roof)]
    return meter(width, "limit", share, style, *value)


def _drafts(stats: Stats, width: int) -> Content:
    """Tokens of a step, and the share of the drafted ones that was accepted."""
    share, style = stats.acceptance, falling(stats.acceptance, GOOD_ACCEPTANCE)
    value = (f"{share:.0%}", f"bold {style}"), f" accepted, {stats.tokens_per_step:.1f} per step"
    return meter(width, "drafts", share, style, *value)


# ---- the graph


def _whole(curve: list[Slice]) -> list[Slice]:
    """`curve` without a last slice that has just begun."""
    return curve[:-1] if len(curve) > 1 and curve[-1].seconds < LEAST_S else curve


def graph(rates: Sequence[float], cells: int, width: int, rows: int = ROWS) -> list[Content]:
    """`rows` lines: an axis with labels at both ends, and the curve in `cells` columns."""
    top = axis_end(max(rates, default=0.0))
    heights = [_height(each, top, rows) for each in stretch(rates, cells)]
    labels = {rows - 1: f"{top:g}" if top < 10_000 else f"{top / 1000:g}k", 0: "0"} if top else {}
    found = []
    for row in reversed(range(rows)):
        label = f"{labels.get(row, ''):>{AXIS - 1}} ", MUTED
        drawn = "".join(EIGHTHS[min(8, max(0, height - 8 * row))] for height in heights)
        found.append(line(width, label, (drawn, CURVE)))
    return found


def axis_end(highest: float) -> float:
    """The first round figure that is not below `highest`; 0 for 0."""
    if highest <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(highest))
    return next((each * power for each in ROUND if each * power >= highest), 10 * power)


def stretch(values: Sequence[float], count: int) -> list[float]:
    """`count` values along the curve of `values`, whose ends stay; zeros for no values."""
    if not values or count <= 1:
        return [values[0] if values else 0.0] * max(0, count)
    found = []
    for index in range(count):
        place = index * (len(values) - 1) / (count - 1)
        before = min(int(place), len(values) - 1)
        after = min(before + 1, len(values) - 1)
        found.append(values[before] + (place - before) * (values[after] - values[before]))
    return found


def _height(value: float, top: float, rows: int) -> int:
    """Height in eighths of a cell, 0 to 8 * rows; at least one for a value above 0."""
    return max(1, round(8 * rows * value / top)) if value > 0 else 0
