"""The line editor of a chat at a terminal: prompt_toolkit with several lines, paste, completions, history, an editor.

Imported where lines are edited: a pipe needs none of it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.search import stop_search

from localq.chat.commands import completion
from localq.chat.terminal import editor, input_history
from localq.cli.line import extended_keys
from localq.cli.line.interrupts import Presses
from localq.cli.line.session import Discarded, TakenBack
from localq.cli.line.type_ahead import Parser, TypedAhead
from localq.cli.output import note
from localq.errors import LocalqError
from localq.sanitize import marked

# Shift-Enter is Ctrl-J in terminals that tell it from Enter: as xterm writes it where it is set to, unasked.
ANSI_SEQUENCES["\x1b[27;2;13~"] = Keys.ControlJ


class LineEditor:
    """Reads lines. Ctrl-C is answered by whoever reads: nothing is raised amid asyncio."""

    def __init__(self, remember: bool, presses: Presses | None = None) -> None:
        """remember: keep what is typed in the input history on disk, unless LOCALQ_NOHISTORY is set. presses: of
        Ctrl-C, that no editor was there to answer."""
        self._presses = presses or Presses()
        self._typed = False  # since this prompt is there
        self._session: PromptSession[str] = PromptSession(
            history=_kept_history() if remember and input_history.kept() else InMemoryHistory(),
            key_bindings=self._keys(),
            input_processors=[Marked()],
            completer=Words(),
            complete_while_typing=False,  # Tab asks
        )
        self._session.default_buffer.on_text_changed += self._changed
        if isinstance(self._session.input, Vt100Input):
            self._session.input.vt100_parser = Parser(self._session.input.vt100_parser.feed_key_callback)
        self.ahead = TypedAhead(self._session.input, self._session.output)

    def read(self, prompt: str) -> str:
        """What is typed. Raises EOFError, and KeyboardInterrupt on Ctrl-C: `Discarded` where something was typed,
        `TakenBack` right behind Enter."""
        self.ahead.stop()
        if (pressed := self._pressed_before()) is not None:  # a second time, while the first was answered
            raise pressed
        # For all of it: a KeyboardInterrupt from amid asyncio leaves its loop in pieces, and words about that.
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            with self._extended_keys():
                line = self._session.prompt(prompt, handle_sigint=False, pre_run=self._begun)
            self.ahead.start()
        finally:
            signal.signal(signal.SIGINT, before)
        if self._presses.taken():
            raise TakenBack
        return line

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("c-j")
        @keys.add("escape", "enter")
        def _newline(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        @keys.add("<sigint>")
        def _interrupt(event: KeyPressEvent) -> None:
            answer = event.app.future  # none before it reads and after: prompt_toolkit would print a traceback
            if answer is not None and not answer.done():
                typed = self._typed or bool(event.current_buffer.text)  # a search has a text of its own
                if event.app.layout.is_searching:  # else the next prompt would be one
                    stop_search()
                event.app.exit(exception=Discarded if typed else KeyboardInterrupt, style="class:aborting")
            else:
                self._presses.hear()

        @keys.add("c-g")
        def _editor(event: KeyPressEvent) -> None:
            run_in_terminal(lambda: self._edit(event.current_buffer))

        return keys

    @contextlib.contextmanager
    def _extended_keys(self) -> Iterator[None]:
        """Shift-Enter is told from Enter, where the terminal can; as long as nobody else reads keys."""
        try:
            self._write(extended_keys.on())
            yield
        finally:
            self._write(extended_keys.off())

    def _write(self, sequence: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._session.output.write_raw(sequence)
            self._session.output.flush()

    def _edit(self, buffer: Buffer) -> None:
        """Have the message written in the user's editor, which gets the keys as it knows them."""
        self._write(extended_keys.off())
        try:
            _edit(buffer)
        finally:
            self._write(extended_keys.on())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler, in any frame of this thread."""
        app = self._session.app
        if app.is_running and app.loop is not None and app.future is not None and not app.future.done():
            app.loop.call_soon_threadsafe(app.key_processor.send_sigint)
        else:
            self._presses.hear()

    def _changed(self, buffer: Buffer) -> None:
        self._typed = True

    def _begun(self) -> None:
        self._typed = False
        if (pressed := self._pressed_before()) is not None:
            self._session.app.exit(exception=pressed, style="class:aborting")

    def _pressed_before(self) -> KeyboardInterrupt | None:
        """What a press means that came before the prompt is there; which of it and of what is typed ahead was first is
        not known, and none of that is lost."""
        if not self._presses.taken():
            return None
        ahead = [key.key for key in self.ahead.waiting()]
        if Keys.ControlM in ahead:
            self._presses.hear()  # of that message, once it is read: taken back
            return None
        return Discarded() if ahead else KeyboardInterrupt()


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


class Marked(Processor):
    """What is pasted may turn text around; prompt_toolkit takes only control characters apart."""

    def apply_transformation(self, line: TransformationInput) -> Transformation:
        """The fragments of a line, with marks."""
        return Transformation([(part[0], marked(part[1]), *part[2:]) for part in line.fragments])


class Words(Completer):
    """Commands at the beginning of a message, names of files behind an @."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Of the word before the cursor."""
        word = document.text_before_cursor.split(" ")[-1].split("\n")[-1]
        if word.startswith("/") and word == document.text_before_cursor:
            found = completion.of_command(word)
        else:
            found = completion.of_file(word) if word.startswith("@") else []
        for text, what in found:
            yield Completion(text, -len(word), display_meta=what)


def _kept_history() -> History:
    """The input history, which the full screen shares; one that goes with the process where it cannot be kept."""
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
