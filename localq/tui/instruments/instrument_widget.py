"""`Instrument`: a widget of a few lines, redrawn only where they change; and helpers for its lines."""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from localq.tui.gauge import MUTED, REST_STYLE, Part, gauge
from localq.tui.instruments.instrument_facts import InstrumentFacts

UNKNOWN = "–"
LABEL = 10  # cells of the label of a meter
VALUE = 13  # cells of its value, at the right
NO_PLAN, NO_NAMES, LOW_GRAPH, NO_SOURCE = 1, 2, 3, 4  # rows that are dropped first, each with those before it
_LEAST_GAUGE = 4  # a shorter gauge says nothing


class Instrument(Widget):
    """Base of the instruments; a subclass defines `lines`."""

    def __init__(self, facts: InstrumentFacts, id: str) -> None:
        super().__init__(id=id)
        self.facts = facts
        self.compact = False  # use as few lines as possible
        self.dropped = 0  # which rows the panel has no room for: 0, or `NO_PLAN` to `NO_SOURCE`
        self._shown: list[Content] = []

    def lines(self, width: int) -> list[Content]:
        """The current lines, at most `width` cells wide; none where there is nothing to say."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Redraw if the lines have changed, and lay out if there are not as many as there are rows.

        The rows count, not the lines last drawn: those may have been drawn for another reason, into too few rows.
        """
        lines = self.lines(self.content_size.width)
        moved = len(lines) != self.content_size.height
        if moved or not _same(lines, self._shown):
            self.refresh(layout=moved)
        self.set_class(not lines, "-empty")

    def render(self) -> Content:
        """See `lines`."""
        self._shown = self.lines(self.content_size.width)
        return Content("\n").join(self._shown)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The number of lines."""
        return len(self.lines(width))


def line(width: int, *parts: str | Part) -> Content:
    """One line of texts and (text, style), cut at `width` cells."""
    made = Content.assemble(*parts)
    return made if made.cell_length <= width else made.truncate(max(0, width), ellipsis=width > 1)


def heading(width: int, title: str, *figure: str | Part) -> Content:
    """The first line of an instrument: its title, a rule, and its most important figure at the right."""
    right = Content.assemble(*figure)
    rule = "─" * max(1, width - cell_len(title) - 1 - (right.cell_length + 1 if right.cell_length else 0))
    return line(width, (title, "bold"), " ", (rule, REST_STYLE), " " if right.cell_length else "", *figure)


def meter(width: int, label: str, share: float | None, style: str, *value: str | Part) -> Content:
    """A label, a gauge of `share` (0 to 1; None: no gauge), and a value at the right."""
    right = Content.assemble(*value)
    cells = width - LABEL - max(VALUE, right.cell_length) - 1
    if cells < _LEAST_GAUGE:
        return line(width, f"{label} ", *value)
    drawn = [(" " * cells, "")] if share is None else gauge(share, cells, style)
    return line(width, f"{label:<{LABEL}}", *drawn, " " * (width - LABEL - cells - right.cell_length), *value)


def figure(value: float) -> str:
    """A number with three digits or more: 38.2, 648, 1234."""
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def words(text: str, width: int, style: str = MUTED) -> list[Content]:
    """`text` wrapped at `width` cells."""
    found: list[str] = []
    for word in text.split():
        if found and cell_len(found[-1]) + 1 + cell_len(word) <= width:
            found[-1] += f" {word}"
        else:
            found.append(word)
    return [line(width, (each, style)) for each in found]


def _same(one: list[Content], other: list[Content]) -> bool:
    return len(one) == len(other) and all(a.is_same(b) for a, b in zip(one, other, strict=True))
