"""Output of verbs: JSON on one line, plain tables, notes on stderr.

stdout carries the answer or the data only; progress, statistics and warnings go to stderr. Escape sequences go to
terminals only. Nothing else of localq names the streams of the process or calls `print`: a test checks it.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import termios
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from localq.cli import stream_encoding
from localq.sanitize import print_lines, sanitize, unfiltered, write_json
from localq.wording import table_lines

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1


def print_json(body: dict[str, Any]) -> None:
    """Print one object on one line of stdout, with `"schema"` first.

    Control characters, bidi overrides and lone surrogates are escaped; without UTF-8 at stdout all non-ASCII is.
    """
    write_json(sys.stdout, {"schema": SCHEMA, **body})


def stdout() -> TextIO:
    """The stream of answers and data."""
    return sys.stdout


def stderr() -> TextIO:
    """The stream of notes."""
    return sys.stderr


def print_line(text: str = "") -> None:
    """Print one line of an answer or data on stdout."""
    print_lines(sys.stdout, text)


def note(text: str = "") -> None:
    """Print one line for the user on stderr."""
    print_lines(sys.stderr, text)


def ask(text: str) -> None:
    """Print a question on stderr; the answer follows on the same line."""
    sys.stderr.write(sanitize(text))
    sys.stderr.flush()


def note_lost_characters() -> None:
    """Warn on stderr about characters that the streams replaced since the last call."""
    for line in stream_encoding.take_warnings():
        note(f"({line})")


def is_rich_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with cursor movement (not TERM=dumb)."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def is_hung_up() -> bool:
    """Return whether a standard stream is a closed terminal: a closed window or a lost connection."""
    for stream in (0, 1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def has_screen() -> bool:
    """Return whether stdin, stdout and stderr are a UTF-8 terminal that can show a full screen."""
    terminals = sys.stdin.isatty() and is_rich_terminal(sys.stdout) and is_rich_terminal(sys.stderr)
    return terminals and stream_encoding.is_utf8(sys.stdout)


def takes_colour(stream: TextIO) -> bool:
    """Return whether text may be dim or coloured: at a terminal, never with NO_COLOR, always with CLICOLOR_FORCE."""
    if os.environ.get("NO_COLOR"):
        return False
    return is_rich_terminal(stream) or os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0")


def stdout_table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Print an aligned plain table, wrapped to the terminal; see `wording.table_lines`."""
    print_lines(sys.stdout, *table_lines(headers, rows, right, terminal_width()))


def terminal_width() -> int | None:
    """Columns of the terminal at stdout or behind the pager; None without a terminal."""
    if sys.__stdout__ is None or sys.__stdout__.closed or not sys.__stdout__.isatty():
        return None
    return shutil.get_terminal_size().columns


def stderr_console() -> Console:
    """A rich console on stderr for progress bars; it sanitizes texts. Imported late: rich costs start-up time."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class CleanConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=sanitize(segment.text))

    dumb = not is_rich_terminal(sys.stderr)
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # another bar is shown
    return CleanConsole(file=unfiltered(stream), force_terminal=False if dumb else None, highlight=False)
