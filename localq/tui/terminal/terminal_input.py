"""Terminal input: pastes, invalid bytes and odd key codes cannot crash the app or act as keys.

Textual's reader (8.2, drivers/linux_driver.py and _xterm_parser.py) crashes on bytes that are not UTF-8 and on invalid
key codes, and takes text after an ESC in a paste for typed keys: a pasted text could press Ctrl-Q, or Enter.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import selectors
import signal
import sys
import termios
import time
import unicodedata
from collections.abc import Callable, Generator, Iterator
from typing import Any

from textual import constants
from textual._parser import Read1
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key, Paste, Resize
from textual.geometry import Size
from textual.message import Message

from localq.tui.terminal import terminal_output
from localq.tui.terminal.input_priority import InputPriority, is_typed
from localq.tui.terminal.terminal_output import TerminalFile

CHUNK_BYTES = 4096
TICK_S = 0.1  # between two checks for the end of the app
# An ESC with nothing after it for this time is the key Esc, which stops a reply. Terminals write a sequence at once,
# and SSH sends it in one piece: vim waits 0.1 s, neovim 0.05 s, tmux 0.01 s. ESCDELAY (milliseconds) overrides it.
ESCAPE_S = constants.ESCAPE_DELAY if "ESCDELAY" in os.environ else 0.05
PASTED, END = "\x1b[200~", "\x1b[201~"
CTRL_C = ("\x03", "\x1b[99;5u")  # the second in kitty's keyboard protocol
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: controls, surrogates, line and paragraph separators


class _Parser(XTermParser):
    """Textual's parser, with ESCAPE_S as timeout."""

    @staticmethod
    def read1(timeout: float | None = None) -> Read1:  # type: ignore[override]  # called on the class
        """Read the next character, with our timeout; Textual's is 0.1 s (8.2)."""
        return Read1(None if timeout is None else ESCAPE_S)


class _Letter(str):
    """A typed character that is text, whatever Python's tables say: `isprintable` is what Textual's widgets ask."""

    __slots__ = ()

    def isprintable(self) -> bool:
        """True."""
        return True


def _keep_letter(message: Message) -> Message:
    """Mark the character of a key as text, unless it is a control character or would break a line.

    Python calls no space but U+0020 printable, nor joiners, direction marks and characters newer than its tables.
    """
    if isinstance(message, Key) and message.character is not None and len(message.character) == 1:
        is_text = unicodedata.category(message.character) not in _NO_TEXT
        message.character = _Letter(message.character) if is_text else message.character
    return message


class InputReader:
    """Bytes of the terminal in, Textual's messages out."""

    def __init__(self, debug: bool = False) -> None:
        self._debug = debug
        self._decode = codecs.getincrementaldecoder("utf-8")("ignore").decode
        self._parser = _Parser(debug)
        self._held, self._held_at_s = "", 0.0  # possible start of a paste
        self._paste: str | None = None  # text of a paste so far

    def feed(self, data: bytes) -> Iterator[Message]:
        """Messages completed by `data`; invalid input is dropped."""
        text, self._held = self._held + self._decode(data), ""
        while text:
            if self._paste is not None:
                text = yield from self._pasted(text)
                continue
            keys, begins, text = text.partition(PASTED)
            if begins:
                self._paste = ""
            else:
                keys = self._hold(keys, more=len(data) == CHUNK_BYTES)
            yield from self._typed(keys)

    def tick(self) -> Iterator[Message]:
        """Messages completed by a timeout."""
        if self._held and time.monotonic() - self._held_at_s >= ESCAPE_S:
            keys, self._held = self._held, ""
            yield from self._typed(keys)
        yield from map(_keep_letter, self._parser.tick())

    @property
    def patience_s(self) -> float:
        """Seconds until `tick` may return a message."""
        ends = [self._held_at_s + ESCAPE_S] if self._held else []
        if self._parser._timeout_time is not None:
            ends.append(self._parser._timeout_time)
        return max(0.0, min(ends) - time.monotonic()) if ends else TICK_S

    def _pasted(self, text: str) -> Generator[Message, None, str]:
        """Take the part of `text` that belongs to the paste; return the rest. Ctrl-C, read by itself, ends
        one whose end was lost: every key would be part of it. In a longer read it may have been pasted."""
        assert self._paste is not None
        begun, self._paste = len(self._paste), self._paste + text
        end = self._paste.find(END, max(0, begun - len(END)))
        if end < 0:
            if text not in CTRL_C:
                return ""
            paste, self._paste = self._paste.removesuffix(text), None
            yield Paste(paste.replace("\0", ""))
            return text
        paste, rest, self._paste = self._paste[:end], self._paste[end + len(END) :], None
        yield Paste(paste.replace("\0", ""))
        return rest

    def _hold(self, keys: str, more: bool) -> str:
        """`keys` without a possible start of a paste at the end. A lone ESC is the key Esc, unless `more` follows."""
        for length in range(len(PASTED) - 1, 0 if more else 1, -1):
            if keys.endswith(PASTED[:length]):
                self._held, self._held_at_s = keys[-length:], time.monotonic()
                return keys[:-length]
        return keys

    def _typed(self, keys: str) -> Iterator[Message]:
        try:
            yield from map(_keep_letter, self._parser.feed(keys) if keys else ())
        except (ValueError, OverflowError):  # invalid key codes
            self._parser = _Parser(self._debug)


class TerminalDriver(LinuxDriver):
    """Textual's driver with our input and output; it writes to stdout, so that stderr can be redirected."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        assert sys.__stdout__ is not None
        self._input_priority: InputPriority | None = getattr(app, "input_priority", None)
        self._before_start: Callable[[], None] = getattr(app, "before_terminal_starts", lambda: None)
        self._terminal = TerminalFile(sys.__stdout__)
        self._file = self._terminal  # type: ignore[assignment]  # has what the writing thread uses

    def start_application_mode(self) -> None:
        """As Textual's, with our handler of resizes: Textual's can post an older size last, when interrupted.

        From here on a signal ends the app through its loop: an exception in here would leave terminal modes set.
        """
        self._before_start()
        super().start_application_mode()  # type: ignore[no-untyped-call]
        loop = asyncio.get_running_loop()

        def resized(*_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._post_size)

        signal.signal(signal.SIGWINCH, resized)
        self._post_size()  # earlier resizes were handled by Textual

    def stop_application_mode(self) -> None:
        """As Textual's, but the terminal echoes keys again only when all output is written, not in the middle of it."""
        attributes, self.attrs_before = self.attrs_before, None
        super().stop_application_mode()
        self.close()
        self.attrs_before = attributes
        if attributes is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, attributes)

    def reset_terminal(self) -> None:
        """Reset the terminal from any thread, without the app; the process ends next."""
        terminal_output.reset(self._terminal.fileno(), self.attrs_before)

    def _post_size(self) -> None:
        if not self._in_band_window_resize:
            size = Size(*self._get_terminal_size())
            self.send_message(Resize(size, size))

    def send_message(self, message: Message) -> None:
        """As Textual's; drawing learns of a key before it has passed the queues."""
        if self._input_priority is not None and is_typed(message):
            self._input_priority.key_read()
        super().send_message(message)

    def _sigcont_application(self, *_: object) -> None:
        """Continue after SIGSTOP: restart the threads, as Textual would start second ones beside the first.

        Not in the handler itself: the interrupted code may hold a lock that the threads need to end.
        """
        if not self._auto_restart or self._must_signal_resume:
            super()._sigcont_application()
            return
        with contextlib.suppress(RuntimeError):  # the loop is starting or ending
            asyncio.get_running_loop().call_soon_threadsafe(self._begin_again)

    def _begin_again(self) -> None:
        self.suspend_application_mode()
        self._must_signal_resume = True  # redraw all: the terminal may have been used meanwhile
        self.resume_application_mode()

    def run_input_thread(self) -> None:
        """Read until the app ends or the terminal is gone."""
        keys = InputReader(self._debug)
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self.fileno, selectors.EVENT_READ)
            except PermissionError:  # restarted by the SIGCONT of a hang-up, without a terminal
                self._terminal.hang_up()
                return
            while not self.exit_event.is_set():
                # Asked again after a timeout: on a busy machine this thread may have had no time to see its bytes.
                if selector.select(keys.patience_s) or selector.select(0):
                    try:
                        data = os.read(self.fileno, CHUNK_BYTES)
                    except OSError:
                        data = b""
                    if not data:
                        self._terminal.hang_up()
                        return
                    messages = keys.feed(data)
                else:
                    messages = keys.tick()
                for message in messages:
                    self.process_message(message)
