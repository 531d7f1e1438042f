"""Text from stdin without a terminal: a limit on its size, a note where it does not come, errors with a cause."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator

from localq.chat.attachments import names_files
from localq.cli.output import note
from localq.errors import usage_error

WAIT_S = 2.0  # a pipe that a parent process left open sends nothing and has no end
MOST_CHARACTERS = 8 * 2**20  # more than any model's context holds
_PIECE = 2**16
_SKIP = "use `</dev/null` to skip this"


def read() -> str:
    """All of stdin without its last line ends; empty at a terminal.

    Raises LocalqError (exit 2) where it is longer than MOST_CHARACTERS or cannot be read.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    pieces, size = [], 0
    with _note_waiting(f"reading stdin until EOF; {_SKIP}"), read_errors():
        while piece := sys.stdin.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            _check_size(size)
    return "".join(pieces).rstrip("\n")


def read_line(first: bool, before: int = 0) -> str:
    """The next line of stdin without its line end. first: of the program, where a note tells that it waits.

    before: characters that the message has already, which count, too. Raises EOFError at the end, and LocalqError as
    `read`.
    """
    waiting = _note_waiting(f"waiting for messages on stdin; {_SKIP}") if first else contextlib.nullcontext()
    with waiting, read_errors():
        line = sys.stdin.readline(MOST_CHARACTERS + 1)
    _check_size(before + len(line))
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def read_bytes() -> bytes:
    """All of stdin as bytes. Raises LocalqError (exit 2) where it is longer than MOST_CHARACTERS or cannot be read."""
    if sys.stdin is None:
        return b""
    with _note_waiting("reading stdin until EOF"), read_errors():
        raw = sys.stdin.buffer.read(MOST_CHARACTERS + 1)
    _check_size(len(raw), "bytes")
    return raw


def has_instructions(text: str) -> bool:
    """Return whether a message would be a command or attach a file if it were typed."""
    return text.startswith("/") or names_files(text)


def _check_size(size: int, unit: str = "characters") -> None:
    if size > MOST_CHARACTERS:
        why = f"too long for any context (limit: {MOST_CHARACTERS:,} {unit})"
        raise usage_error("stdin", why, "Pipe in less text.")


@contextlib.contextmanager
def _note_waiting(text: str) -> Iterator[None]:
    """Print `text` on stderr after WAIT_S."""
    timer = threading.Timer(WAIT_S, _print, [f"localq: {text}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        note(text)


@contextlib.contextmanager
def read_errors() -> Iterator[None]:
    """Turn an error of reading stdin into a LocalqError (exit 2).

    A pipe is made to block: without data it has not ended.
    """
    try:
        with contextlib.suppress(io.UnsupportedOperation, ValueError):  # not a file, in tests
            os.set_blocking(sys.stdin.fileno(), True)
        yield
    except OSError as error:
        why = f"cannot be read ({error.strerror or error})"
        raise usage_error("stdin", why, "Pipe text in, or redirect stdin from a text file or /dev/null.") from error
    except UnicodeError as error:  # invalid bytes are replaced, but not the lack of UTF-16's byte order mark
        raise usage_error(
            "stdin", f"not valid {sys.stdin.encoding} text ({error})", "Unset PYTHONIOENCODING."
        ) from error
