"""`Prose`: one widget for many blocks of a reply that are not code.

Textual has a widget for every paragraph, item and cell, and each costs time at every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual.content import Content, _FormattedLine
from textual.geometry import Size
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Markdown

from localq.tui.reply.prose_blocks import ProseBlock
from localq.tui.reply.prose_rows import Breaker, Cell, Row, margin, takes_mark
from localq.tui.reply.reply_block import SizedByContent

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
WIDTHS = 2  # cached: with and without a scrollbar


class Prose(SizedByContent, Widget):
    """Several blocks, one below the other."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *HEADINGS,
        *("em", "strong", "s", "code_inline"),
        *("bullet", "quote", "quote-bar", "rule", "table", "grid", "heading"),
    }
    DEFAULT_CSS = """
    Prose { width: 1fr; height: auto; }
    Prose > .em { text-style: italic; }
    Prose > .strong { text-style: bold; }
    Prose > .s { text-style: strike; }
    Prose > .quote { background: $boost; }
    Prose > .quote-bar { color: $text-primary 50%; }
    Prose > .rule { color: $secondary; }
    Prose > .grid { color: $foreground 20%; }
    Prose > .heading { color: $primary; }
    Prose > .bullet { color: $text-primary; }
    Prose:dark > .code_inline { background: $warning 10%; color: $text-warning 95%; }
    Prose:light > .code_inline { background: $error 5%; color: $text-error 95%; }
    Prose:light > .quote-bar { color: $text-secondary; }
    Prose:light > .bullet { color: $text-secondary; }
    Prose:light > .table { background: white 30%; }
    Prose:ansi > .code_inline { background: ansi_default; }
    """ + "".join(
        f"Prose > .{each} {{ color: $markdown-{each}-color; background: $markdown-{each}-background;"
        f" text-style: $markdown-{each}-text-style; }}\n"
        for each in HEADINGS
    )

    def __init__(self, blocks: Sequence[ProseBlock]) -> None:
        super().__init__()
        self._broken: dict[tuple[int, Selection | None], list[Row]] = {}
        self.take(blocks)

    def take(self, blocks: Sequence[ProseBlock]) -> None:
        """Show blocks; at least one."""
        self._blocks = blocks
        self._broken.clear()
        self.styles.margin = (margin(blocks[0])[0], 0, margin(blocks[-1])[1], 0)
        self.refresh(layout=True)

    def _rows(self, width: int) -> list[Row]:
        selection = self.text_selection if self.is_attached else None
        rows = self._broken.get((width, selection))
        if rows is None:
            for old in list(self._broken)[: 1 - WIDTHS]:
                del self._broken[old]
            rows = self._broken[width, selection] = self._breaker(selection).rows(self._blocks, width)
        return rows

    def _breaker(self, selection: Selection | None) -> Breaker:
        if selection is None:
            return Breaker(self._get_style, None, None)
        selected = Style.from_styles(self.screen.get_component_styles("screen--selection"))
        return Breaker(self._get_style, selection, selected)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Rows at a width."""
        return len(self._rows(width)) if width else 0

    def render_line(self, y: int) -> Strip:
        """Draw one row."""
        width, base = self.size.width, self.visual_style
        rows = self._rows(width) if width else []
        if y >= len(rows):
            return Strip.blank(width, base.rich_style)
        strip = Strip([segment for cell in rows[y] for segment in self._drawn(cell)])
        if not self.screen._selecting:
            strip = strip._apply_link_style(self.link_style)
        return strip.adjust_cell_length(width, base.rich_style)

    def _drawn(self, cell: Cell) -> list[Segment]:
        style = self.get_visual_style(*cell.names)
        if cell.names[-1:] == ("quote-bar",):  # as a border: half of its colour is the background around the quote
            around = self.get_visual_style(*cell.names[:-2]).background or style.background
            if around is not None:
                style += Style(foreground=around + self.get_component_styles("quote-bar").color)
        if isinstance(cell.line, _FormattedLine):
            segments, width = cell.line.to_strip(style)
        else:
            shown = Content(cell.line) if isinstance(cell.line, str) else cell.line
            segments, width = shown.render_segments(style), shown.cell_length
        if width < cell.width:
            segments.append(Segment(" " * (cell.width - width), style.background_style.rich_style))
        return segments

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text, not wrapped."""
        breaker = self._breaker(None)
        breaker.rows(self._blocks, max(1, self.size.width))
        lines = []
        for y, (mark, text) in enumerate(breaker.lines_of_text):
            span = selection.get_span(y)
            if span is not None:
                start, end = span
                lines.append((mark if takes_mark(selection, y) else "") + text[start : None if end == -1 else end])
        return "\n".join(lines), "\n"

    async def action_link(self, href: str) -> None:
        """Post a click on a link."""
        self.post_message(Markdown.LinkClicked(self.query_ancestor(Markdown), href))
