"""Decode speed over the last minute, with the roofline of the card's bandwidth at the same scale.

Braille: a cell has two columns of four dots; a column is a second. The roofline is that of the positions in use at the
time, so it falls as the context fills.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.content import Content

from localq.tui.instruments.instrument_facts import InstrumentFacts, Slice
from localq.tui.instruments.instrument_widget import Instrument, figure, line, words
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.planner.speed.roofline import Roof

ROWS = 4  # of the graph
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # of a braille cell: left and right column, from the bottom
BLANK = 0x2800
AXIS = 5  # cells left of the graph
NO_ROOF_CPU = "bandwidth share: GPU only"
NO_ROOF_CARD = "bandwidth share unknown: measure this card with `localq fit`"
NO_ROOF_MODEL = "no bandwidth share for this model"


class SpeedGraph(Instrument):
    """Figures, graph, and the share of the bandwidth."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        facts = self.facts
        texts = explanation(facts)
        if self.compact:
            below = [line(width, shorten(texts[0], width))] if texts else []
        else:
            below = [each for text in texts for each in words(text, width, "")]
        return [_figures(facts, width), *graph(facts, max(0, width - AXIS), width), *below]


def rate_and_roof(facts: InstrumentFacts) -> tuple[float, float]:
    """(tok/s, roofline): current values during a reply, else the mean of the last one, at its middle."""
    speed, roof = facts.speed, facts.roof
    used, is_now = speed.last.context_used, speed.running and speed.now > 0
    if not is_now:
        used -= speed.last.generated_tokens // 2
    return speed.now if is_now else speed.last.tokens_per_s, roof.tokens_per_s(max(0, used)) if roof else 0.0


def explanation(facts: InstrumentFacts) -> list[str]:
    """The share of the roofline and its source, or why there is none."""
    if facts.loaded is None:
        return []
    if facts.roof is None:
        model = NO_ROOF_CARD if facts.loaded.reads else NO_ROOF_MODEL
        return [model if facts.on_gpu else NO_ROOF_CPU]
    rate, roof = rate_and_roof(facts)
    gb_per_s, source = facts.roof.bandwidth.bytes_per_s / 1e9, facts.roof.bandwidth.source
    share = f"{100 * rate / roof:.0f}% of the" if rate else f"{figure(roof)} tok/s is the"
    moved = human_bytes(facts.roof.reads.at(facts.speed.last.context_used))
    return [f"{share} limit of {gb_per_s:,.0f} GB/s ({source})", f"{moved} read per token"]


def shorten(text: str, width: int) -> str:
    """`text`, without its explanation where it does not fit."""
    return text if cell_len(text) <= width else re.split(r": | \(", text, maxsplit=1)[0]


def _figures(facts: InstrumentFacts, width: int) -> Content:
    if facts.loaded is None:
        return line(width, ("tok/s", "bold"), ": no model loaded")
    speed, roof = facts.speed, rate_and_roof(facts)[1]
    parts = [f"now {figure(speed.now)}"] if speed.running and speed.now else []
    if speed.last.decode_s > 0:
        parts.append(f"mean {figure(speed.last.tokens_per_s)}")
    elif not parts:
        parts.append("reading the prompt" if speed.running else "no reply yet")
    bound = (f", roof {figure(roof)}", "$warning") if facts.roof else ""
    return line(width, ("tok/s", "bold"), f" {', '.join(parts)}", bound)


# ---- the graph


def graph(facts: InstrumentFacts, cells: int, width: int) -> list[Content]:
    """`ROWS` lines: an axis with labels, and `cells` of dots."""
    slices = list(facts.speed.slices)[-2 * cells :] if cells else []
    roofs = _roofs(facts.roof, slices, facts.speed.last.context_used, 2 * cells)
    rates = [0.0] * (2 * cells - len(slices)) + [each.tokens_per_s for each in slices]
    top = max([*roofs, *rates], default=0.0)
    labels = _labels(rate_and_roof(facts), top)
    bars, lines = _heights(rates, top), _heights(roofs, top)
    found = []
    for row in reversed(range(ROWS)):
        parts: list[tuple[str, str]] = [(f"{labels.get(row, ''):>{AXIS - 1}} ", "$text-muted")]
        parts += [_cell(bars[2 * i : 2 * i + 2], lines[2 * i : 2 * i + 2], row) for i in range(cells)]
        found.append(line(width, *_join_spans(parts)))
    return found


def _roofs(roof: Roof | None, slices: Sequence[Slice], used: int, columns: int) -> list[float]:
    if roof is None:
        return []
    first = slices[0].used if slices else used
    return [roof.tokens_per_s(first)] * (columns - len(slices)) + [roof.tokens_per_s(each.used) for each in slices]


def _heights(values: Sequence[float], top: float) -> list[int]:
    """Height of each value in dots, 0 to 4 * ROWS; at least one for a value above 0."""
    return [max(1, round(4 * ROWS * value / top)) if value > 0 else 0 for value in values]


def _cell(bars: Sequence[int], lines: Sequence[int], row: int) -> tuple[str, str]:
    """A cell of two columns: dots of the bars, and the dot of the line."""
    bits, style = BLANK, ""
    for column, dots in enumerate(DOTS):
        for up, bit in enumerate(dots):
            height = 4 * row + up + 1
            if lines and lines[column] == height:
                bits, style = bits | bit, style or "$warning"
            if bars[column] >= height:
                bits, style = bits | bit, "$primary"
    return chr(bits), style


def _labels(shown: tuple[float, float], top: float) -> dict[int, str]:
    """Row -> label: 0 at the bottom, the roofline, and the speed where that row is free."""
    if not top:
        return {0: "0"}
    rate, roof = shown
    labels = {0: "0"}
    for value in (roof, rate):
        row = (_heights([value], top)[0] - 1) // 4
        if row > 0 and row not in labels:
            labels[row] = figure(value)
    return labels


def _join_spans(parts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one style joined."""
    found: list[tuple[str, str]] = []
    for text, style in parts:
        if found and found[-1][1] == style:
            found[-1] = (found[-1][0] + text, style)
        else:
            found.append((text, style))
    return found
