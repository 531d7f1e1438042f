"""tok/s over the last minute of decoding, and the roof that the card's bandwidth sets as a line at the same scale.

Braille: a cell has two columns of four dots, a column is a second. The roof is drawn for the positions that were in use
at the time, so it falls as the context fills; columns before the first reply show it for what is in use now.
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
NO_ROOF_CPU = "no roof: a share of the bandwidth is told of GPUs alone"
NO_ROOF_CARD = "no roof: the bandwidth of this card is not known; `localq fit` measures it"
NO_ROOF_MODEL = "no roof: not all of this model is read for a token"


class SpeedGraph(Instrument):
    """The figures, the graph, and the share of what the bandwidth allows in words."""

    def lines(self, width: int) -> list[Content]:
        """See `Instrument`."""
        facts = self.facts
        said = explanation(facts)
        if self.compact:
            below = [line(width, shorten(said[0], width))] if said else []
        else:
            below = [each for text in said for each in words(text, width, "")]
        return [_figures(facts, width), *graph(facts, max(0, width - AXIS), width), *below]


def rate_and_roof(facts: InstrumentFacts) -> tuple[float, float]:
    """(tok/s, the roof for it): now while a reply runs, else the mean of the last one with the roof in its middle."""
    speed, roof = facts.speed, facts.roof
    used, is_now = speed.last.context_used, speed.running and speed.now > 0
    if not is_now:
        used -= speed.last.generated_tokens // 2
    return speed.now if is_now else speed.last.tokens_per_s, roof.tokens_per_s(max(0, used)) if roof else 0.0


def explanation(facts: InstrumentFacts) -> list[str]:
    """The share of the roof and where the roof comes from, or why there is none."""
    if facts.loaded is None:
        return []
    if facts.roof is None:
        model = NO_ROOF_CARD if facts.loaded.reads else NO_ROOF_MODEL
        return [model if facts.on_gpu else NO_ROOF_CPU]
    rate, roof = rate_and_roof(facts)
    gb_per_s, source = facts.roof.bandwidth.bytes_per_s / 1e9, facts.roof.bandwidth.source
    share = f"{100 * rate / roof:.0f} % of what" if rate else f"{figure(roof)} tok/s are what"
    moved = human_bytes(facts.roof.reads.at(facts.speed.last.context_used))
    return [f"{share} {gb_per_s:,.0f} GB/s allow ({source})", f"{moved} read a token"]


def shorten(said: str, width: int) -> str:
    """`said`, or where it does not fit without what explains it: where the roof comes from, why there is none."""
    return said if cell_len(said) <= width else re.split(r": | \(", said, maxsplit=1)[0]


def _figures(facts: InstrumentFacts, width: int) -> Content:
    if facts.loaded is None:
        return line(width, ("tok/s", "bold"), ": no model is loaded")
    speed, roof = facts.speed, rate_and_roof(facts)[1]
    told = [f"now {figure(speed.now)}"] if speed.running and speed.now else []
    if speed.last.decode_s > 0:
        told.append(f"mean {figure(speed.last.tokens_per_s)}")
    elif not told:
        told.append("reading the prompt" if speed.running else "no reply yet")
    bound = (f", roof {figure(roof)}", "$warning") if facts.roof else ""
    return line(width, ("tok/s", "bold"), f" {', '.join(told)}", bound)


# ---- the graph


def graph(facts: InstrumentFacts, cells: int, width: int) -> list[Content]:
    """`ROWS` lines: an axis with the figures at their heights, and `cells` of dots."""
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
        found.append(line(width, *_joined(parts)))
    return found


def _roofs(roof: Roof | None, slices: Sequence[Slice], used: int, columns: int) -> list[float]:
    if roof is None:
        return []
    first = slices[0].used if slices else used
    return [roof.tokens_per_s(first)] * (columns - len(slices)) + [roof.tokens_per_s(each.used) for each in slices]


def _heights(values: Sequence[float], top: float) -> list[int]:
    """Dots of each value, 0 to 4 * ROWS; what is not nothing has at least one."""
    return [max(1, round(4 * ROWS * value / top)) if value > 0 else 0 for value in values]


def _cell(bars: Sequence[int], lines: Sequence[int], row: int) -> tuple[str, str]:
    """Of two columns: the dots of the bars below their heights, and the top dot of the line."""
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
    """Row -> figure: nothing at the bottom, the roof, and the speed where no other stands."""
    if not top:
        return {0: "0"}
    rate, roof = shown
    labels = {0: "0"}
    for value in (roof, rate):
        row = (_heights([value], top)[0] - 1) // 4
        if row > 0 and row not in labels:
            labels[row] = figure(value)
    return labels


def _joined(parts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one style together."""
    found: list[tuple[str, str]] = []
    for text, style in parts:
        if found and found[-1][1] == style:
            found[-1] = (found[-1][0] + text, style)
        else:
            found.append((text, style))
    return found
