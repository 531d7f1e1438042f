"""Reads a message: from the line editor at a terminal, or plain lines from a pipe or a dumb terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import TracebackType

from localq.cli import piped_input
from localq.cli.line.interrupts import Interrupts
from localq.cli.line.session import InputDiscarded
from localq.cli.output import is_rich_terminal, stdout

PROMPT, CONTINUED = ">>> ", "... "
END = "\0end"  # compared by identity: the pipe ended inside a message, which is sent as it is


class Reader:
    """Reads one message a call; as a context, keeps what is typed between two messages for the next.

    Raises EOFError at the end and KeyboardInterrupt on Ctrl-C: `InputDiscarded` if a part of the message was typed.
    """

    def __init__(self, remember: bool = True, interrupts: Interrupts | None = None) -> None:
        """Set up the reader.

        remember     save input to the history on disk, unless LOCALQ_NOHISTORY is set
        interrupts   pending presses of Ctrl-C, which the prompt handles
        """
        self._interrupts, self._stack = interrupts or Interrupts(), contextlib.ExitStack()
        self._editor, self._waited, self._taken = None, False, 0
        if sys.stdin.isatty() and is_rich_terminal(stdout()):
            from localq.cli.line.line_editor import LineEditor  # start-up cost: a pipe needs none

            self._editor = LineEditor(remember, self._interrupts)

    def __call__(self) -> str:
        """Read one message."""
        return _join_lines(self._line)

    def _line(self, continued: bool) -> str:
        prompt = CONTINUED if continued else PROMPT
        if self._editor is not None:
            return self._editor.read(prompt)
        with self._interrupts.raise_inside():
            if sys.stdin.isatty():
                return input(prompt)
            return self._piped(continued)

    def _piped(self, continued: bool) -> str:
        first, self._waited = not self._waited, True
        try:
            line = piped_input.read_line(first, self._taken if continued else 0)
        except EOFError:
            if not continued:
                raise
            return END
        self._taken = len(line) + 1 + (self._taken if continued else 0)
        return line

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """A context in which another program uses the terminal."""
        return self._editor.ahead.suspend() if self._editor is not None else contextlib.nullcontext()

    def __enter__(self) -> Reader:
        if self._editor is not None:
            self._stack.enter_context(self._editor.ahead.hold())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


def _join_lines(read: Callable[[bool], str]) -> str:
    r"""One message: a line, lines that end in a backslash, or text between triple quotes."""
    line = read(False)
    try:
        return _read_continuation(line, lambda: read(True))
    except KeyboardInterrupt:
        raise InputDiscarded from None  # the earlier lines


def _read_continuation(line: str, more: Callable[[], str]) -> str:
    if line.strip().startswith('"""'):
        rest = line.strip()[3:]
        lines: list[str] = []
        while not rest.rstrip().endswith('"""'):
            lines.append(rest)
            if (rest := more()) is END:
                return "\n".join(lines).strip("\n")
        return "\n".join([*lines, rest.rstrip()[:-3]]).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        if (line := more()) is END:
            return "\n".join(lines)
    return "\n".join([*lines, line])
