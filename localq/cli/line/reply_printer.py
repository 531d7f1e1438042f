"""How a reply is printed: drawn as Markdown at a terminal that can show it, as it was written anywhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from localq.chat.reply import Retold
from localq.cli.output import is_rich_terminal, note, takes_colour
from localq.cli.stream_encoding import is_utf8

if TYPE_CHECKING:
    from localq.cli.markdown.stream import MarkdownStream


class Printer(Protocol):
    """Takes a reply piece by piece."""

    def write(self, text: str) -> None:
        """More of it."""

    def pause(self) -> None:
        """Something else is about to be written to the terminal."""

    def end(self) -> None:
        """It is all there; the line that was begun ends."""

    def cut(self) -> None:
        """It has failed; a line that was begun ends."""


class AsWritten:
    """To a pipe, a file, a terminal of which nothing is known; or to a terminal for a user who wants it so."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._open = stream, False

    def write(self, text: str) -> None:
        """As it is: the sanitizer has seen it, whoever reads a pipe wants nothing else done to it."""
        self._stream.write(text)
        self._stream.flush()
        self._open = not text.endswith("\n") if text else self._open

    def pause(self) -> None:
        """Nothing of what is written moves."""

    def end(self) -> None:
        """One end of a line, whatever there was."""
        self.write("\n")

    def cut(self) -> None:
        """Where one was begun."""
        if self._open:
            self.write("\n")


class Drawn:
    """As Markdown."""

    def __init__(self, drawing: MarkdownStream, stream: TextIO) -> None:
        self.write, self.pause, self.cut = drawing.write, drawing.end, drawing.end
        self._drawing, self._stream = drawing, stream

    def end(self) -> None:
        """An empty reply is an empty line."""
        self._drawing.end()
        if self._drawing.is_empty:
            self._stream.write("\n")
            self._stream.flush()


class Nowhere:
    """What is made of the reply is printed when it is there."""

    def write(self, text: str) -> None:
        """Not now."""

    pause = end = cut = lambda self: None


@contextlib.contextmanager
def printing(markdown: bool, said: str = "", stream: TextIO | None = None) -> Iterator[Printer]:
    """A printer to `stream`, by default stdout; Markdown where that is wanted and can be shown.

    said   what of this reply was printed before: a block of code that is open there goes on
    """
    stream = sys.stdout if stream is None else stream
    if not markdown or not is_rich_terminal(stream) or not is_utf8(stream):
        yield AsWritten(stream)
        return
    from localq.cli.markdown.stream import MarkdownStream  # start-up cost: a pipe needs none of it
    from localq.cli.markdown.terminal_rows import Watch

    with Watch(stream).heard() as watch:
        if watch.size is None:
            yield AsWritten(stream)
        else:
            yield Drawn(MarkdownStream(stream, watch, takes_colour(stream), said), stream)


def tell(text: str, markdown: bool) -> None:
    """What a command or a conversation that is gone on with has to tell, on stderr; replies in it as they are shown."""
    for part, is_reply in text.parts if isinstance(text, Retold) else [(text, False)]:
        if not is_reply:
            note(part)
            continue
        with printing(markdown, stream=sys.stderr) as printer:
            printer.write(part)
            printer.end()
