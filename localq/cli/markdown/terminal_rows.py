"""The cursor of a terminal after a text, and whether the terminal changed meanwhile.

Terminals differ in the width of some characters. Text that will be redrawn is therefore wrapped here, at the largest
width each character may have, so that the number of rows is certain and no other line is overwritten.
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
    """Wraps text into rows of `columns`. row, column: the position, relative to the start."""

    def __init__(self, columns: int) -> None:
        self.columns, self.row, self.column = columns, 0, 0
        self._ambiguous = 2 if _language() in _EAST_ASIAN else 1

    def wrap(self, text: str) -> str:
        """`text` with a newline wherever the next character may not fit, and tabs as blanks.

        The last column stays free: terminals disagree about the cursor after a character there.
        """
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
    """Rows of a line that the terminal wraps; None if uncertain."""
    if line.isascii() and "\t" not in line:
        return max(1, -(-len(line) // columns))
    cursor = Cursor(columns)
    cursor.wrap(line.replace("\t", 2 * _TAB))
    return 1 if cursor.row == 0 else None


def size_of(stream: TextIO) -> os.terminal_size | None:
    """Columns and rows of a terminal; None if unknown."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return None
    return size if size.columns and size.lines else None


def width_of(size: os.terminal_size) -> int:
    """Columns to draw in; COLUMNS may reduce them."""
    text = os.environ.get("COLUMNS", "")
    columns = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    return min(size.columns, columns or size.columns)


class TerminalWatch:
    """Detects changes of a terminal: its size, and output of others."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._signals = stream, 0
        self.size = size_of(stream)
        self._start = self._state()

    def begin(self) -> None:
        """Start watching from here."""
        self.size = size_of(self._stream)
        self._start = self._state()

    def is_unchanged(self) -> bool:
        """Return whether there was no resize, suspend (Ctrl-Z) or echoed Enter since `begin`."""
        return self._start == self._state()

    def _state(self) -> tuple[int, os.terminal_size | None, int]:
        return self._signals, size_of(self._stream), _lines_typed(self._stream)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    @contextlib.contextmanager
    def listen(self) -> Iterator[TerminalWatch]:
        """Count signals inside, on the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._count) for number in (signal.SIGWINCH, signal.SIGCONT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _lines_typed(stream: TextIO) -> int:
    """Bytes of unread lines at a terminal that echoes input; else 0."""
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
