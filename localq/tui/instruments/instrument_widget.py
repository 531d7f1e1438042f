"""`Instrument`: a widget of a few lines, redrawn only where they change; and helpers for its lines."""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from localq.tui.instruments.instrument_facts import InstrumentFacts

EIGHTHS = " ▏▎▍▌▋▊▉█"
UNKNOWN = "–"


class Instrument(Widget):
    """Base of the instruments; a subclass defines `lines`."""

    def __init__(self, facts: InstrumentFacts, id: str) -> None:
        super().__init__(id=id)
        self.facts = facts
        self.compact = False  # use as few lines as possible
        self._shown: list[Content] = []

    def lines(self, width: int) -> list[Content]:
        """The current lines, at most `width` cells wide."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Redraw if the lines have changed."""
        lines = self.lines(self.content_size.width)
        if not _same(lines, self._shown):
            self.refresh(layout=len(lines) != len(self._shown))
        self.set_class(not lines, "-empty")

    def render(self) -> Content:
        """See `lines`."""
        self._shown = self.lines(self.content_size.width)
        return Content("\n").join(self._shown)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The number of lines."""
        return len(self.lines(width))


def line(width: int, *parts: str | tuple[str, str]) -> Content:
    """One line of texts and (text, style), cut at `width` cells."""
    made = Content.assemble(*parts)
    return made if made.cell_length <= width else made.truncate(max(0, width), ellipsis=width > 1)


def bar(share: float, width: int) -> str:
    """A bar: `share` (0 to 1) of `width` cells, in eighths, filled with blanks."""
    eighths = round(min(1.0, max(0.0, share)) * 8 * max(0, width))
    drawn = EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
    return drawn.ljust(max(0, width))


def figure(value: float) -> str:
    """A number with three digits or more: 38.2, 648, 1234."""
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def words(text: str, width: int, style: str = "$text-muted") -> list[Content]:
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
