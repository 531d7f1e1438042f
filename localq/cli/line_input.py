"""Reading a message at a terminal: history, several lines, paste; or plain lines from a pipe or a dumb terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

from localq import editor, input_history
from localq.cli.output import is_rich_terminal, note
from localq.errors import LocalqError
from localq.sanitize import marked

if TYPE_CHECKING:
    from prompt_toolkit.buffer import Buffer
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History

ReadLine = Callable[[], str]
PROMPT = ">>> "


class TakenBack(KeyboardInterrupt):
    """A Ctrl-C right behind the Enter that sent a message; the input history has it."""


def reader(remember: bool = True) -> ReadLine:
    """A function that reads one message. Raises EOFError at the end and KeyboardInterrupt on Ctrl-C.

    remember: keep what is typed in the input history on disk, unless LOCALQ_NOHISTORY is set.
    """
    if sys.stdin.isatty() and is_rich_terminal(sys.stdout):
        return _terminal_reader(remember)
    shown = PROMPT if sys.stdin.isatty() else ""
    return lambda: _joined_lines(lambda continued: input("... " if continued and shown else shown))


def _terminal_reader(remember: bool) -> ReadLine:
    from prompt_toolkit import PromptSession  # start-up cost: a pipe needs no line editor
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput

    class Marked(Processor):
        """What is pasted may turn text around; prompt_toolkit takes only control characters apart."""

        def apply_transformation(self, line: TransformationInput) -> Transformation:
            return Transformation([(part[0], marked(part[1]), *part[2:]) for part in line.fragments])

    _take_shift_enter()
    keys = KeyBindings()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    presses: list[bool] = []  # of Ctrl-C, that no editor was there to answer

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _interrupt(event: KeyPressEvent) -> None:
        answer = event.app.future  # none before it reads and after: prompt_toolkit would print a traceback
        if answer is not None and not answer.done():
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
        else:
            presses.append(True)

    @keys.add("c-g")
    def _editor(event: KeyPressEvent) -> None:
        run_in_terminal(lambda: _edit(event.current_buffer))

    history = _kept_history() if remember and input_history.kept() else InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        history=history,
        key_bindings=keys,
        input_processors=[Marked()],
        completer=_completer(),
        complete_while_typing=False,  # Tab asks
    )

    def pressed(number: int, frame: FrameType | None) -> None:
        app = session.app
        if app.is_running and app.loop is not None and app.future is not None and not app.future.done():
            app.loop.call_soon_threadsafe(app.key_processor.send_sigint)
        else:
            presses.append(True)

    def taken() -> bool:
        """Whether there was a press, which is answered now."""
        there = bool(presses)
        presses.clear()
        return there

    def begun() -> None:
        if taken():
            session.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    def ask(continued: bool) -> str:
        if taken():  # a second press, while the first was answered
            raise KeyboardInterrupt
        # For all of it: a KeyboardInterrupt from amid asyncio leaves its loop in pieces, and words about that.
        before = signal.signal(signal.SIGINT, pressed)
        try:
            line = session.prompt("... " if continued else PROMPT, handle_sigint=False, pre_run=begun)
        finally:
            signal.signal(signal.SIGINT, before)
        if taken():
            raise TakenBack
        return line

    return lambda: _joined_lines(ask)


def _edit(buffer: Buffer) -> None:
    """Have the message written in the user's editor, to which a Ctrl-C belongs meanwhile."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        buffer.text = editor.edited(buffer.text, "Go on here.")
        buffer.cursor_position = len(buffer.text)
    except LocalqError as error:
        note(f"localq: {error}")
    finally:
        signal.signal(signal.SIGINT, before)


def _take_shift_enter() -> None:
    """Let Shift-Enter be Ctrl-J in terminals that tell it from Enter: in the kitty protocol, or as xterm writes it."""
    from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
    from prompt_toolkit.keys import Keys

    ANSI_SEQUENCES.update({"\x1b[13;2u": Keys.ControlJ, "\x1b[27;2;13~": Keys.ControlJ})


def _completer() -> Completer:
    """Commands at the beginning of a message, names of files behind an @."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    from localq.commands import completing

    class Words(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            word = document.text_before_cursor.split(" ")[-1].split("\n")[-1]
            if word.startswith("/") and word == document.text_before_cursor:
                found = completing.of_command(word)
            else:
                found = completing.of_file(word) if word.startswith("@") else []
            for text, what in found:
                yield Completion(text, -len(word), display_meta=what)

    return Words()


def _kept_history() -> History:
    """The input history, which the TUI shares; one that goes with the process where it cannot be kept."""
    from prompt_toolkit.history import History, InMemoryHistory

    try:
        path = input_history.opened()
    except OSError as error:
        note(f"{error.filename}: the input history cannot be kept ({error.strerror})")
        return InMemoryHistory()

    class Kept(History):
        def load_history_strings(self) -> Iterable[str]:
            with contextlib.suppress(OSError):
                yield from reversed(input_history.read(path))

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk takes no line more, and none of the chat
                input_history.append(path, string)

    return Kept()


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
