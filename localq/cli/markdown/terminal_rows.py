"""Where the cursor of a terminal is after what was written there, and whether anybody else has written meanwhile.

Terminals differ in how wide they draw a character. So what is to be overwritten is broken into rows here, at the
largest width that a character may have: the rows are as many as are counted, and no line is overwritten that is not
known to be one of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
import threading
import unicodedata
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

_TAB = " " * 4
_WIDENS = "\ufe0f"  # draws the character before it as an emoji
_EAST_ASIAN = ("ja", "ko", "zh")  # languages whose terminals may draw Greek, Cyrillic and signs wide


class Cursor:
    """Breaks text into rows of `columns`. row, column: where it has got to, from where it began."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column = columns, 0, 0
        self._ambiguous = 2 if _language() in _EAST_ASIAN else 1

    def broken(self, text: str) -> str:
        """`text` with an end of line wherever the next character may not fit; a tab is blanks. The last column stays
        free: behind a character there, terminals disagree about where the cursor is."""
        written = []
        for letter in text.replace("\t", _TAB):
            if letter == "\n":
                self.row, self.column = self.row + 1, 0
            else:
                width = self._width(letter)
                if self.column + width >= self.columns and letter != _WIDENS and width:
                    written.append("\n")
                    self.row, self.column = self.row + 1, 0
                self.column += width
            written.append(letter)
        return "".join(written)

    def _width(self, letter: str) -> int:
        if " " <= letter <= "~" or letter == _WIDENS:
            return 1
        category = unicodedata.category(letter)
        if category in ("Mn", "Me"):
            return 0
        width = unicodedata.east_asian_width(letter)
        if width == "A" and category != "Co":
            return self._ambiguous
        return 2 if width in "WF" or category in ("Cn", "Co") or letter >= "\U0001f000" else 1


def rows_of(line: str, columns: int) -> int | None:
    """How many rows a line takes that the terminal breaks; None where that is not certain."""
    if line.isascii() and "\t" not in line:
        return max(1, -(-len(line) // columns))
    cursor = Cursor(columns)
    cursor.broken(line.replace("\t", 2 * _TAB))
    return 1 if cursor.row == 0 else None


def size_of(stream: TextIO) -> os.terminal_size | None:
    """Columns and rows; None where they are not known."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return None
    return size if size.columns and size.lines else None


def width_of(size: os.terminal_size) -> int:
    """Columns to draw in: COLUMNS may say that they are fewer."""
    said = os.environ.get("COLUMNS", "")
    wanted = int(said) if said.isascii() and said.isdigit() and len(said) < 6 else 0
    return min(size.columns, wanted or size.columns)


class Watch:
    """Tells whether a terminal is as it was: of the same size all the time, and nothing written by others."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._signals = stream, 0
        self.size = size_of(stream)
        self._was = self._now()

    def begin(self) -> None:
        """From here on."""
        self.size = size_of(self._stream)
        self._was = self._now()

    def is_as_it_was(self) -> bool:
        """Since `begin`: no resize, no stop and going on (Ctrl-Z), and no Enter that the terminal has echoed."""
        return self._was == self._now()

    def _now(self) -> tuple[int, os.terminal_size | None, int]:
        return self._signals, size_of(self._stream), _lines_typed(self._stream)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    @contextlib.contextmanager
    def heard(self) -> Iterator[Watch]:
        """Signals are heard within, where they can be."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGWINCH, signal.SIGCONT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _lines_typed(stream: TextIO) -> int:
    """Bytes of whole lines that nobody has read yet, at a terminal that shows what is typed; else 0."""
    try:
        if not termios.tcgetattr(stream.fileno())[3] & termios.ECHO:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(stream.fileno(), termios.FIONREAD, b"\0" * 4))[0])
    except (termios.error, OSError, ValueError):
        return 0


def _language() -> str:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        if os.environ.get(name):
            return os.environ[name][:2].lower()
    return ""
