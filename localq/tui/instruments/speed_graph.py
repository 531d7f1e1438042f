"""Decode speed of a reply (its last 4 minutes) as a curve over the whole width, and its share of what the card's
bandwidth allows.

The axis ends at the highest speed of the reply, and begins at 0, or at
half of the highest where the speed never falls below that; both ends are labelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from textual.content import Content

from localq.tui.gauge import MUTED, Part, falling
from localq.tui.instruments.instrument_facts import InstrumentFacts, Slice
from localq.tui.instruments.instrument_widget import Instrument, figure, heading, line, meter, words
from localq.wording import human_bytes

ROWS = 4  # of the graph
CURVE, BELOW = "$primary", "$primary 50%"
EIGHTHS = " ▁▂▃▄▅▆▇█"
AXIS = 5  # cells left of the graph
FAIR, BAD = 0.6, 0.35  # share of the limit: from which it is good, below which it is bad
LEAST_S = 0.3  # of the last slice: a shorter one says little
NO_ROOF_CARD = "bandwidth share unknown: measure this card with `localq fit`"


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
            found += graph([each.tokens_per_s for each in _whole(curve)], max(0, width - AXIS), width)
        if facts.roof is not None:
            found.append(_limit(facts, width))
        return found if self.compact else [*found, *words(explanation(facts), width)]


def rate_and_roof(facts: InstrumentFacts) -> tuple[float, float]:
    """(tok/s, roofline): current values during a reply, else the mean of the last one, at its middle."""
    speed, roof = facts.speed, facts.roof
    used, is_now = speed.last.context_used, speed.running and speed.now > 0
    if not is_now:
        used -= speed.last.generated_tokens // 2
    return speed.now if is_now else speed.last.tokens_per_s, roof.tokens_per_s(max(0, used)) if roof else 0.0


def explanation(facts: InstrumentFacts) -> str:
    """Where the limit comes from, or how to learn it; "" on the CPU, which has none."""
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
    style = falling(share, FAIR, BAD)
    value: list[str | Part] = [(f"{share:.0%}", f"bold {style}"), f" of {figure(roof)}"] if rate else [figure(roof)]
    return meter(width, "limit", share, style, *value)


# ---- the graph


def _whole(curve: list[Slice]) -> list[Slice]:
    """`curve` without a last slice that has just begun."""
    return curve[:-1] if len(curve) > 1 and curve[-1].seconds < LEAST_S else curve


def graph(rates: Sequence[float], cells: int, width: int) -> list[Content]:
    """`ROWS` lines: an axis with labels at both ends, and the curve in `cells` columns."""
    top = max(rates, default=0.0)
    bottom = top / 2 if rates and min(rates) > top / 2 else 0.0
    heights = [_height(each, bottom, top) for each in stretch(rates, cells)]
    labels = {ROWS - 1: figure(top), 0: figure(bottom) if bottom else "0"} if top else {}
    found = []
    for row in reversed(range(ROWS)):
        label = f"{labels.get(row, ''):>{AXIS - 1}} ", MUTED
        found.append(line(width, label, *_row([height - 8 * row for height in heights])))
    return found


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


def _row(eighths: Sequence[int]) -> list[Part]:
    """Cells filled up to `eighths`; those below the curve are paler."""
    cells = [(EIGHTHS[min(8, max(0, each))], BELOW if each > 8 else CURVE) for each in eighths]
    return [("".join(cell for cell, _ in group), style) for style, group in groupby(cells, key=lambda cell: cell[1])]


def _height(value: float, bottom: float, top: float) -> int:
    """Height in eighths of a cell, 0 to 8 * ROWS; at least one for a value above 0."""
    return max(1, round(8 * ROWS * (value - bottom) / (top - bottom))) if value > 0 else 0
