"""The last filter before the terminal: no control character of a text is written.

Names, titles, errors and messages reach widgets in many ways, and Textual removes only a few control characters, not
ESC. Its own sequences for colours and positions are not affected.
"""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from localq.sanitize import sanitize


class SanitizeLines(LineFilter):
    """Sanitizes each segment of a line; removed characters, tabs and line ends have no width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The segments with sanitized texts."""
        return [part if part.control or part.text == (clean := _clean(part.text)) else Segment(clean, part.style)
                for part in segments]  # fmt: skip


def _clean(text: str) -> str:
    return sanitize(text).replace("\n", "").replace("\t", "")


SANITIZE_LINES = SanitizeLines()
