"""`CodeFences`: whether a text that streams stands in a code block between fences, as CommonMark has them."""

from __future__ import annotations

import re

_LINE = 200  # characters of a line that are kept
_FENCE = re.compile(r"[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*(`{3,}|~{3,})([^\n]*)")


class CodeFences:
    """Text in, piece by piece; `inside` then says where the next character stands."""

    def __init__(self) -> None:
        self._fence = self._line = ""

    def push(self, text: str) -> None:
        """Read on."""
        *lines, last = text.split("\n")
        for line in lines:
            self._end(self._line + line[:_LINE])
            self._line = ""
        self._line = (self._line + last)[:_LINE]

    def copy(self) -> CodeFences:
        """Return a copy at the same place."""
        made = CodeFences()
        made._fence, made._line = self._fence, self._line
        return made

    @property
    def inside(self) -> bool:
        """True while the text is in a code block, or in the line that opens or closes it."""
        return bool(self._fence or self._opening(self._line))

    def _end(self, line: str) -> None:
        """A line is complete."""
        if not self._fence:
            self._fence = self._opening(line)
            return
        found = _FENCE.match(line)
        if found and found[1].startswith(self._fence) and not found[2].strip():
            self._fence = ""

    def _opening(self, line: str) -> str:
        """The fence that a line opens, "" for none: behind one of backticks no backtick follows."""
        found = _FENCE.match(line)
        return "" if found is None or (found[1][0] == "`" and "`" in found[2]) else found[1]
