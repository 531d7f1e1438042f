"""What the verbs print with: one-line JSON, plain tables, sizes, and notes on stderr.

stdout carries the answer or the data and nothing else; progress, statistics and warnings go to stderr. No escape
sequence is written unless the stream is a terminal that wants them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import termios
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from localq.cli import stream_encoding
from localq.sanitize import sanitize
from localq.wording import table_lines

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1


def print_json(body: dict[str, Any]) -> None:
    """Print one object on one line of stdout, with `"schema"` first.

    What would move the cursor, hide or turn text is escaped, and so are the half characters of a path that is no text,
    and everything where stdout has no UTF-8.
    """
    text = json.dumps({"schema": SCHEMA, **body}, ensure_ascii=False)
    if sanitize(text) != text or not stream_encoding.is_utf8(sys.stdout):
        text = json.dumps({"schema": SCHEMA, **body})
    print(text, flush=True)


def note(text: str) -> None:
    """One line for the user on stderr."""
    print(sanitize(text), file=sys.stderr, flush=True)


def tell_lost() -> None:
    """What the streams could not take or give since the last time, on stderr."""
    for line in stream_encoding.lost():
        with contextlib.suppress(OSError):
            note(f"({line})")


def is_rich_terminal(stream: TextIO) -> bool:
    """True when `stream` is a terminal that can take cursor movement (not TERM=dumb)."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def is_hung_up() -> bool:
    """A standard stream is a terminal that is gone: a window that was closed, a connection that broke."""
    for stream in (0, 1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def has_screen() -> bool:
    """stdin, stdout and stderr are a terminal that can show a full screen; where one is not, somebody reads lines.

    In UTF-8: with other encodings frames are question marks and what is typed is lost.
    """
    terminals = sys.stdin.isatty() and is_rich_terminal(sys.stdout) and is_rich_terminal(sys.stderr)
    return terminals and stream_encoding.is_utf8(sys.stdout)


def takes_colour(stream: TextIO) -> bool:
    """Whether text there may be dim: at a terminal, by NO_COLOR never, by CLICOLOR_FORCE always."""
    if os.environ.get("NO_COLOR"):
        return False
    return is_rich_terminal(stream) or os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0")


def stdout_table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Print an aligned plain table, at a terminal in its columns; see `wording.table_lines`."""
    for line in table_lines(headers, rows, right, terminal_width()):
        print(line)
    sys.stdout.flush()


def terminal_width() -> int | None:
    """Columns of the terminal at stdout, also of one that a pager shows things at; None where there is none."""
    if sys.__stdout__ is None or sys.__stdout__.closed or not sys.__stdout__.isatty():
        return None
    return shutil.get_terminal_size().columns


def stderr_console() -> Console:
    """A rich console on stderr for progress bars; imported late because rich costs start-up time."""
    from rich.console import Console

    dumb = not is_rich_terminal(sys.stderr)
    return Console(stderr=True, force_terminal=False if dumb else None, highlight=False)
