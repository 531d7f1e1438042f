"""Printers of a reply: Markdown at a terminal that can show it, raw text elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from localq.chat.reply import Recap
from localq.cli.output import is_rich_terminal, note, stderr, stdout, takes_colour
from localq.cli.stream_encoding import is_utf8
from localq.sanitize import unfiltered

if TYPE_CHECKING:
    from localq.cli.markdown.stream import MarkdownStream


class Printer(Protocol):
    """Prints a reply piece by piece."""

    def write(self, text: str) -> None:
        """Print the next piece."""

    def pause(self) -> None:
        """Prepare for other output to the terminal."""

    def end(self) -> None:
        """Finish a complete reply; ends the line."""

    def cut(self) -> None:
        """Finish a failed reply; ends an open line."""


class RawPrinter:
    """Prints the raw text: to a pipe, a file, a dumb terminal, or with --no-markdown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._open = stream, False

    def write(self, text: str) -> None:
        """Print the text unchanged; it is sanitized already."""
        self._stream.write(text)
        self._stream.flush()
        self._open = not text.endswith("\n") if text else self._open

    def pause(self) -> None:
        """Nothing to do: raw text is never redrawn."""

    def end(self) -> None:
        """Print one newline, also after an empty reply."""
        self.write("\n")

    def cut(self) -> None:
        """End an open line."""
        if self._open:
            self.write("\n")


class MarkdownPrinter:
    """Draws the reply as Markdown."""

    def __init__(self, drawing: MarkdownStream, stream: TextIO) -> None:
        self.write, self.pause, self.cut = drawing.write, drawing.end, drawing.end
        self._drawing, self._stream = drawing, stream

    def end(self) -> None:
        """Finish the reply; an empty one is an empty line."""
        self._drawing.end()
        if self._drawing.is_empty:
            self._stream.write("\n")
            self._stream.flush()


class NullPrinter:
    """Prints nothing: the caller prints a part of the finished reply."""

    def write(self, text: str) -> None:
        """Ignore the text."""

    pause = end = cut = lambda self: None


@contextlib.contextmanager
def open_printer(markdown: bool, previous: str = "", stream: TextIO | None = None) -> Iterator[Printer]:
    """A printer to `stream` (default stdout); Markdown if it is wanted and the terminal can show it.

    previous   the part of the reply printed before: a code block open there continues
    """
    stream = stdout() if stream is None else stream
    if not markdown or not is_rich_terminal(stream) or not is_utf8(stream):
        yield RawPrinter(stream)
        return
    from localq.cli.markdown.stream import MarkdownStream  # start-up cost: not for a pipe
    from localq.cli.markdown.terminal_rows import TerminalWatch

    with TerminalWatch(stream).listen() as watch:
        if watch.size is None:
            yield RawPrinter(stream)
        else:
            terminal = unfiltered(stream)  # a reply is sanitized already
            yield MarkdownPrinter(MarkdownStream(terminal, watch, takes_colour(stream), previous), terminal)


def print_message(text: str, markdown: bool) -> None:
    """Print the message of a command or a resumed conversation on stderr; replies in it may be Markdown."""
    for part, is_reply in text.parts if isinstance(text, Recap) else [(text, False)]:
        if not is_reply:
            note(part)
            continue
        with open_printer(markdown, stream=stderr()) as printer:
            printer.write(part)
            printer.end()
