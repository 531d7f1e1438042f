"""Thinking of a model, printed on stderr or to a file, never on stdout."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

from localq import disk
from localq.cli.output import stderr, takes_colour
from localq.errors import LocalqError, usage_error
from localq.sanitize import sanitize, unfiltered

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Thoughts:
    """Prints thinking piece by piece. stream None: prints nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._dim = stream is not None and takes_colour(stream)
        self._stream = unfiltered(stream) if stream is not None and self._dim else stream
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
        self._stream.write(text)
        self._stream.flush()


class _ThoughtFile(io.TextIOBase):
    """The file of `--think-out`, as a stream; it is opened with the first thought."""

    def __init__(self, path: Path) -> None:
        self.output = disk.LazyOutput(path)

    def write(self, text: str) -> int:
        """Write a piece of a thought. Raises LocalqError (exit 9)."""
        self.output.write(text.encode("utf-8", "replace"))
        return len(text)

    def isatty(self) -> bool:
        """Return whether the file is a terminal."""
        return self.output.is_terminal


@contextlib.contextmanager
def open_thoughts(quiet: bool, path: str | Path | None = None) -> Iterator[Thoughts]:
    """Print thinking to the file `path`, else to stderr unless `quiet`.

    The file keeps what it has until there is a thought. Raises LocalqError (exit 9) for one that cannot be written.
    """
    if path is None:
        yield Thoughts(None if quiet else stderr())
        return
    file = _ThoughtFile(Path(path))
    try:
        yield Thoughts(cast(TextIO, file))
    except BaseException:
        with contextlib.suppress(LocalqError):  # the first failure counts
            file.output.close()
        raise
    file.output.close()


def check_not_of_model(path: Path | None, model: Path) -> None:
    """Raise LocalqError (exit 2) for a file of `--think-out` that is the model, or is in its folder."""
    if path is None:
        return
    files = [model, *(model.iterdir() if model.is_dir() else ())]
    with disk.disk_errors(path):
        is_inside = disk.resolve(path).is_relative_to(disk.resolve(model))
    is_one = path.exists() and any(each.exists() and each.samefile(path) for each in files)  # in the cache: by a link
    if is_one or is_inside:
        raise usage_error("--think-out", f"{path} is part of the model", "Choose another file.")
