"""The line editor of the chat: prompt_toolkit with multi-line input, completion and history."""

from __future__ import annotations

import contextlib
import signal
from asyncio import AbstractEventLoop
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

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
from prompt_toolkit.output import create_output
from prompt_toolkit.search import stop_search

from localq.chat.commands import completion
from localq.chat.terminal import editor, error_log, input_history
from localq.cli.line import extended_keys
from localq.cli.line.interrupts import Interrupts
from localq.cli.line.session import InputDiscarded, SendCancelled
from localq.cli.line.type_ahead import KeyParser, TypeAhead
from localq.cli.output import note, stdout
from localq.errors import LocalqError
from localq.sanitize import replace_unsafe, unfiltered

# Shift-Enter as Ctrl-J, in the form that xterm sends if configured to.
ANSI_SEQUENCES["\x1b[27;2;13~"] = Keys.ControlJ


class LineEditor:
    """Reads lines. Ctrl-C is raised from `read`, never inside asyncio."""

    def __init__(self, remember: bool, interrupts: Interrupts | None = None) -> None:
        """Set up the editor.

        remember     save input to the history on disk, unless LOCALQ_NOHISTORY is set
        interrupts   presses of Ctrl-C that came while no editor was running
        """
        self._interrupts = interrupts or Interrupts()
        self._typed = False  # since the prompt appeared
        self._session: PromptSession[str] = PromptSession(
            history=_history_on_disk() if remember and input_history.is_enabled() else InMemoryHistory(),
            key_bindings=self._keys(),
            output=create_output(unfiltered(stdout())),  # it shows control characters of the text as ^X
            input_processors=[UnsafeCharacters()],
            completer=ChatCompleter(),
            complete_while_typing=False,  # Tab asks
        )
        self._session.default_buffer.on_text_changed += self._changed
        if isinstance(self._session.input, Vt100Input):
            self._session.input.vt100_parser = KeyParser(self._session.input.vt100_parser.feed_key_callback)
        # prompt_toolkit prints a traceback and waits for Enter.
        self._session.app._handle_exception = _report_unexpected  # type: ignore[method-assign]
        self.ahead = TypeAhead(self._session.input, self._session.output)

    def read(self, prompt: str) -> str:
        """Read a line. Raises EOFError, and KeyboardInterrupt on Ctrl-C.

        `InputDiscarded` if text was typed, `SendCancelled` right after Enter.
        """
        self.ahead.stop()
        if (pressed := self._pressed_before()) is not None:  # a second press, while the first was handled
            raise pressed
        # A KeyboardInterrupt inside asyncio would break its loop and print a traceback.
        before = signal.signal(signal.SIGINT, self._handle_signal)
        try:
            with self._extended_keys():
                line = self._session.prompt(prompt, handle_sigint=False, pre_run=self._begun)
            self.ahead.start()
        finally:
            signal.signal(signal.SIGINT, before)
        if self._interrupts.take():
            raise SendCancelled
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
            answer = event.app.future  # None outside of reading, where prompt_toolkit would print a traceback
            if answer is not None and not answer.done():
                typed = self._typed or bool(event.current_buffer.text)  # a search has its own text
                if event.app.layout.is_searching:  # else the next prompt would be a search
                    stop_search()
                event.app.exit(exception=InputDiscarded if typed else KeyboardInterrupt, style="class:aborting")
            else:
                self._interrupts.add()

        @keys.add("c-g")
        def _editor(event: KeyPressEvent) -> None:
            run_in_terminal(lambda: self._edit(event.current_buffer))

        return keys

    @contextlib.contextmanager
    def _extended_keys(self) -> Iterator[None]:
        """Enable kitty's keyboard protocol while the editor reads keys."""
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
        """Edit the message in the user's editor, with the keyboard protocol off."""
        self._write(extended_keys.off())
        try:
            _edit(buffer)
        finally:
            self._write(extended_keys.on())

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT in any frame of this thread."""
        app = self._session.app
        if app.is_running and app.loop is not None and app.future is not None and not app.future.done():
            app.loop.call_soon_threadsafe(app.key_processor.send_sigint)
        else:
            self._interrupts.add()

    def _changed(self, buffer: Buffer) -> None:
        self._typed = True

    def _begun(self) -> None:
        self._typed = False
        if (pressed := self._pressed_before()) is not None:
            self._session.app.exit(exception=pressed, style="class:aborting")

    def _pressed_before(self) -> KeyboardInterrupt | None:
        """The exception for a press that came before the prompt; None without one.

        The order of the press and of keys typed ahead is unknown; no key is lost.
        """
        if not self._interrupts.take():
            return None
        ahead = [key.key for key in self.ahead.waiting()]
        if Keys.ControlM in ahead:
            self._interrupts.add()  # cancels that message once it is read
            return None
        return InputDiscarded() if ahead else KeyboardInterrupt()


def _edit(buffer: Buffer) -> None:
    """Edit the message in the user's editor, which handles Ctrl-C meanwhile."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        buffer.text = editor.edit(buffer.text, "Continue typing here.")
        buffer.cursor_position = len(buffer.text)
    except LocalqError as error:
        note(f"localq: {error}")
    finally:
        signal.signal(signal.SIGINT, before)


class UnsafeCharacters(Processor):
    """Shows bidi overrides of pasted text as U+FFFD; prompt_toolkit handles control characters only."""

    def apply_transformation(self, line: TransformationInput) -> Transformation:
        """Replace unsafe characters in a line."""
        return Transformation([(part[0], replace_unsafe(part[1]), *part[2:]) for part in line.fragments])


class ChatCompleter(Completer):
    """Completes commands at the start of a message and file names after @."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Completions of the word before the cursor."""
        word = document.text_before_cursor.split(" ")[-1].split("\n")[-1]
        if word.startswith("/") and word == document.text_before_cursor:
            found = completion.command_completions(word)
        else:
            found = completion.file_completions(word) if word.startswith("@") else []
        for text, what in found:
            yield Completion(text, -len(word), display_meta=what)


def _history_on_disk() -> History:
    """The input history, shared with the full screen; in memory if the file cannot be written."""
    try:
        path = input_history.open_file()
    except OSError as error:
        note(f"{error.filename}: cannot save the input history ({error.strerror})")
        return InMemoryHistory()

    class FileHistory(History):
        def load_history_strings(self) -> Iterable[str]:
            with contextlib.suppress(OSError):
                yield from reversed(input_history.read(path))

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk must not end the chat
                input_history.append(path, string)

    return FileHistory()


def _report_unexpected(loop: AbstractEventLoop, context: dict[str, Any]) -> None:
    """Print one line for an error of a key or of the completion, and go on reading."""
    error = context.get("exception")
    if isinstance(error, Exception):
        failure = error_log.unexpected("prompt", error)
        run_in_terminal(lambda: note(f"localq: {failure}"))
