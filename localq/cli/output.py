"""How verbs print: JSON on one line, plain tables, notes on stderr.

stdout carries the answer or the data only; progress, statistics and warnings go to stderr. Escape sequences go to
terminals only.
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

    Control characters, bidi overrides and lone surrogates are escaped; without UTF-8 at stdout all non-ASCII is.
    """
    text = json.dumps({"schema": SCHEMA, **body}, ensure_ascii=False)
    if sanitize(text) != text or not stream_encoding.is_utf8(sys.stdout):
        text = json.dumps({"schema": SCHEMA, **body})
    print(text, flush=True)


def note(text: str) -> None:
    """Print one line for the user on stderr."""
    print(sanitize(text), file=sys.stderr, flush=True)


def note_lost_characters() -> None:
    """Warn on stderr about characters that the streams replaced since the last call."""
    for line in stream_encoding.take_warnings():
        with contextlib.suppress(OSError):
            note(f"({line})")


def is_rich_terminal(stream: TextIO) -> bool:
    """`stream` is a terminal with cursor movement (not TERM=dumb)."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def is_hung_up() -> bool:
    """A standard stream is a closed terminal: a closed window or a lost connection."""
    for stream in (0, 1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def has_screen() -> bool:
    """stdin, stdout and stderr are a UTF-8 terminal that can show a full screen."""
    terminals = sys.stdin.isatty() and is_rich_terminal(sys.stdout) and is_rich_terminal(sys.stderr)
    return terminals and stream_encoding.is_utf8(sys.stdout)


def takes_colour(stream: TextIO) -> bool:
    """Text may be dim or coloured: at a terminal, never with NO_COLOR, always with CLICOLOR_FORCE."""
    if os.environ.get("NO_COLOR"):
        return False
    return is_rich_terminal(stream) or os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0")


def stdout_table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Print an aligned plain table, wrapped to the terminal; see `wording.table_lines`."""
    for line in table_lines(headers, rows, right, terminal_width()):
        print(line)
    sys.stdout.flush()


def terminal_width() -> int | None:
    """Columns of the terminal at stdout or behind the pager; None without a terminal."""
    if sys.__stdout__ is None or sys.__stdout__.closed or not sys.__stdout__.isatty():
        return None
    return shutil.get_terminal_size().columns


def stderr_console() -> Console:
    """A rich console on stderr for progress bars; imported late because rich costs start-up time."""
    from rich.console import Console

    dumb = not is_rich_terminal(sys.stderr)
    return Console(stderr=True, force_terminal=False if dumb else None, highlight=False)
