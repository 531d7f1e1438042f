"""`CodeLines`: draws visible lines only; Textual redraws all of a growing text at every step."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import _FormattedLine
from textual.geometry import Size
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widgets import Label

from localq.tui.reply.code_colours import TAB, ColouredLine

_Seen = tuple[ColouredLine, Style, tuple[int, int] | None, int]  # inputs of a row


class CodeLines(Label):
    """Lines of code, not wrapped."""

    def __init__(self, lines: Sequence[ColouredLine], id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines = lines
        self._drawn: dict[int, tuple[_Seen, Strip]] = {}

    def take(self, lines: Sequence[ColouredLine]) -> None:
        """Show lines; the same objects as before are not redrawn."""
        before = len(self._lines), self._width
        self._lines = lines
        self.refresh(layout=before != (len(lines), self._width))

    @property
    def _width(self) -> int:
        return max((line.width for line in self._lines), default=0)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        """Width of the longest line, at least that of the container."""
        return max(container.width, self._width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The number of lines."""
        return len(self._lines)

    def notify_style_update(self) -> None:
        """Clear the drawn rows: another theme has other colours."""
        self._drawn.clear()
        super().notify_style_update()

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        width, style = self.size.width, self.visual_style
        if y >= len(self._lines):
            return Strip.blank(width, style.rich_style)
        selection = self.text_selection
        span = None if selection is None else selection.get_span(y)
        seen = (self._lines[y], style, span, width)
        known = self._drawn.get(y)
        if known is None or known[0] != seen:  # lines compare by identity
            known = self._drawn[y] = (seen, self._strip(y, *seen))
        return known[1]

    def _strip(self, y: int, line: ColouredLine, style: Style, span: tuple[int, int] | None, width: int) -> Strip:
        content = line.content
        if span is not None:
            selected = Style.from_styles(self.screen.get_component_styles("screen--selection"))
            content = content.stylize(selected, span[0], len(content.plain) if span[1] == -1 else span[1])
        shown = _FormattedLine(self._get_style, content.expand_tabs(TAB), width, y=y)
        return Strip(*shown.to_strip(style)).adjust_cell_length(width, style.rich_style)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text, unchanged."""
        return selection.extract("\n".join(line.content.plain for line in self._lines)), "\n"
