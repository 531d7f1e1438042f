"""Thinking of a model, printed on stderr or to a file, never on stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from localq import disk
from localq.cli.output import stderr, takes_colour
from localq.sanitize import sanitize, unfiltered

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Thoughts:
    """Prints thinking piece by piece. stream None: prints nothing."""

    def __init__(self, stream: TextIO | None, path: Path | None = None) -> None:
        """`path`: the file of the stream, for errors (LocalqError, exit 9)."""
        self._dim = stream is not None and takes_colour(stream)
        self._stream, self._path = unfiltered(stream) if stream is not None and self._dim else stream, path
        self._open = False

    def write(self, text: str) -> None:
        """Print a piece. Each piece resets its dim style, so that a failure leaves the terminal in order."""
        if self._stream is None:
            return
        heading = "" if self._open or self._dim else "(thinking)\n"
        self._open = True
        self._write(heading + (f"{_DIM}{sanitize(text)}{_PLAIN}" if self._dim else text))

    def end(self) -> None:
        """End the thinking with an empty line."""
        was_open, self._open = self._open, False
        if was_open:
            self._write("\n\n")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        with contextlib.nullcontext() if self._path is None else disk.disk_errors(self._path):
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def open_thoughts(quiet: bool, path: str | None = None) -> Iterator[Thoughts]:
    """Print thinking to the file `path`, else to stderr unless `quiet`.

    Raises LocalqError (exit 9) for a file that cannot be written.
    """
    if path is None:
        yield Thoughts(None if quiet else stderr())
        return
    place = Path(path)
    with disk.disk_errors(place):
        file = open(place, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    try:
        yield Thoughts(file, place)
    except BaseException:
        with contextlib.suppress(OSError):  # the first failure counts
            file.close()
        raise
    with disk.disk_errors(place):
        file.close()
