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

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._dim = stream is not None and takes_colour(stream)
        self._open = False

    def write(self, text: str) -> None:
        """A piece of a thought. Each piece ends its own dimming: whatever happens next, the terminal is as it was."""
        if self._stream is None:
            return
        if not self._open and not self._dim:
            self._stream.write("(thinking)\n")
        self._open = True
        self._stream.write(f"{_DIM}{text}{_PLAIN}" if self._dim else text)
        self._stream.flush()

    def end(self) -> None:
        """The thought is over: an empty line parts it from what follows."""
        if self._open and self._stream is not None:
            self._stream.write("\n\n")
            self._stream.flush()
        self._open = False


@contextlib.contextmanager
def shown(quiet: bool, path: str | None = None) -> Iterator[Thoughts]:
    """Thoughts go to the file `path`, else to stderr unless it shall be quiet. Raises LocalqError for a bad file."""
    if path is None:
        yield Thoughts(None if quiet else sys.stderr)
        return
    with disk.disk_errors(Path(path)):
        file = open(path, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below; only opening is guarded
    with file:
        yield Thoughts(file)
