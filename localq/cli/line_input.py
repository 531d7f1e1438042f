"""Reading a message: from the line editor at a terminal, or plain lines from a pipe or a dumb terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

from localq.cli.output import is_rich_terminal

ReadLine = Callable[[], str]
PROMPT, CONTINUED = ">>> ", "... "


def reader(remember: bool = True) -> ReadLine:
    """A function that reads one message. Raises EOFError at the end and KeyboardInterrupt on Ctrl-C.

    remember: keep what is typed in the input history on disk, unless LOCALQ_NOHISTORY is set.
    """
    if sys.stdin.isatty() and is_rich_terminal(sys.stdout):
        from localq.cli.line_editor import LineEditor  # start-up cost: a pipe needs none

        editor = LineEditor(remember)
        return lambda: _joined_lines(lambda continued: editor.read(CONTINUED if continued else PROMPT))
    shown = (CONTINUED, PROMPT) if sys.stdin.isatty() else ("", "")
    return lambda: _joined_lines(lambda continued: input(shown[0] if continued else shown[1]))


def _joined_lines(read: Callable[[bool], str]) -> str:
    r"""One message: a line, lines that end in a backslash, or everything between two lines of triple quotes."""
    line = read(False)
    if line.strip().startswith('"""'):
        rest = line.strip()[3:]
        lines: list[str] = []
        while not rest.rstrip().endswith('"""'):
            lines.append(rest)
            rest = read(True)
        return "\n".join([*lines, rest.rstrip()[:-3]]).strip("\n")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read(True)
    return "\n".join([*lines, line])
