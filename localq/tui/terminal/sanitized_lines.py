"""The last sieve before a full screen: whatever a widget draws, no control character of a text reaches the terminal.

Names of models and files, titles, errors and messages come to widgets on many ways, and Textual writes them as they
are: it takes out a few control characters and leaves ESC. What it draws itself, colours and places, is no text.
"""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from localq.sanitize import sanitize


class SanitizeLines(LineFilter):
    """`sanitize` for each segment of a line; what goes has no width, and so have tabs and ends of lines within one."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The segments, their texts harmless."""
        return [part if part.control or part.text == (clean := _clean(part.text)) else Segment(clean, part.style)
                for part in segments]  # fmt: skip


def _clean(text: str) -> str:
    return sanitize(text).replace("\n", "").replace("\t", "")


SANITIZE_LINES = SanitizeLines()
