"""Reading a message at a terminal: history, several lines, paste; or plain lines from a pipe or a dumb terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from localq import places
from localq.cli.output import is_rich_terminal

ReadLine = Callable[[], str]
PROMPT = ">>> "


def reader() -> ReadLine:
    """A function that reads one message. Raises EOFError at the end and KeyboardInterrupt on Ctrl-C."""
    if sys.stdin.isatty() and is_rich_terminal(sys.stdout):
        return _terminal_reader()
    shown = PROMPT if sys.stdin.isatty() else ""
    return lambda: _joined_lines(lambda continued: input("... " if continued and shown else shown))


def _terminal_reader() -> ReadLine:
    from prompt_toolkit import PromptSession  # start-up cost: a pipe needs no line editor
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: FileHistory | InMemoryHistory = InMemoryHistory()
    if not os.environ.get("LOCALQ_NOHISTORY"):
        folder = places.state_dir()
        folder.mkdir(parents=True, exist_ok=True)
        history = FileHistory(str(folder / "history"))
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys, enable_open_in_editor=False)
    return lambda: _joined_lines(lambda continued: session.prompt("... " if continued else PROMPT))


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
