"""What a model thinks before it answers, as the command line shows it: on stderr, never among the answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from localq import disk
from localq.cli.output import takes_colour

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Thoughts:
    """Takes thoughts piece by piece. stream None = they are not shown."""

    def __init__(self, stream: TextIO | None, path: Path | None = None) -> None:
        """`path` where the stream is that file: then what fails is a LocalqError (exit 9)."""
        self._stream, self._path = stream, path
        self._dim = stream is not None and takes_colour(stream)
        self._open = False

    def write(self, text: str) -> None:
        """A piece of a thought. Each piece ends its own dimming: whatever happens next, the terminal is as it was."""
        if self._stream is None:
            return
        begun = "" if self._open or self._dim else "(thinking)\n"
        self._open = True
        self._write(begun + (f"{_DIM}{text}{_PLAIN}" if self._dim else text))

    def end(self) -> None:
        """The thought is over: an empty line parts it from what follows."""
        was_open, self._open = self._open, False
        if was_open:
            self._write("\n\n")

    def _write(self, text: str) -> None:
        assert self._stream is not None
        with contextlib.nullcontext() if self._path is None else disk.disk_errors(self._path):
            self._stream.write(text)
            self._stream.flush()


@contextlib.contextmanager
def shown(quiet: bool, path: str | None = None) -> Iterator[Thoughts]:
    """Thoughts go to the file `path`, else to stderr unless it shall be quiet.

    Raises LocalqError (exit 9) for a file that cannot be opened, written or closed.
    """
    if path is None:
        yield Thoughts(None if quiet else sys.stderr)
        return
    place = Path(path)
    with disk.disk_errors(place):
        file = open(place, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    try:
        yield Thoughts(file, place)
    except BaseException:
        with contextlib.suppress(OSError):  # what could not be written cannot be written now either
            file.close()
        raise
    with disk.disk_errors(place):
        file.close()
