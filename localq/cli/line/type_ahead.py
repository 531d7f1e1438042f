"""Keys typed while no line editor reads: they wait for the next prompt; Ctrl-C acts at once.

Between two prompts prompt_toolkit leaves the terminal to the kernel, which echoes keys into the reply, turns Enter into
Ctrl-J (so a message is not sent) and drops pending input at Ctrl-C. If that drops the end of a paste, the next editor
takes every key, Ctrl-C included, for a part of the paste.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Any

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

from localq.cli.line import extended_keys

_PASTE = "\x1b[200~"
_PASTE_OR_KEY = re.compile(f"{re.escape(_PASTE)}|{extended_keys.KEY.pattern}")
BACKGROUND_S = 0.2  # how often a chat in the background checks for the terminal


class KeyParser(Vt100Parser):
    """prompt_toolkit's parser with kitty's keyboard protocol; Ctrl-C ends a paste whose end was lost."""

    _cut = ""  # an incomplete key

    def feed(self, data: str) -> None:
        """Feed input, as in prompt_toolkit."""
        data, self._cut = self._cut + data, ""
        while not self._in_bracketed_paste and (found := _PASTE_OR_KEY.search(data)) and found[0] != _PASTE:
            super().feed(data[: found.start()] + extended_keys.legacy_sequence(found))
            data = data[found.end() :]
        if not self._in_bracketed_paste and _PASTE not in data and (cut := extended_keys.CUT.search(data)):
            data, self._cut = data[: cut.start()], cut[0]
        super().feed(data)
        if self._in_bracketed_paste and self._paste_buffer.endswith("\x03"):
            pasted = self._paste_buffer[:-1]
            self.reset()
            self.feed_key_callback(KeyPress(Keys.BracketedPaste, pasted))
            self.feed_key_callback(KeyPress(Keys.ControlC, "\x03"))

    def flush(self) -> None:
        """Treat an incomplete key as complete, as in prompt_toolkit."""
        cut, self._cut = self._cut, ""
        super().feed(cut)
        super().flush()


class TypeAhead:
    """Reads the terminal from `start` to `stop`, and keeps the keys for the next editor."""

    def __init__(self, input: Input, output: Output) -> None:
        self._input, self._output = input, output
        self._before: list[Any] | None = None  # attributes of the terminal to restore; None: not taken
        self._listening: threading.Thread | None = None
        self._wake, self._woken = -1, -1

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the terminal, from `start` on.

        Keys typed while a model loaded are kept too. There the kernel turned Enter into Ctrl-J, so a final Ctrl-J is
        taken for Enter.
        """
        try:
            self._before = termios.tcgetattr(self._input.fileno())
        except (termios.error, OSError, NotImplementedError):  # no terminal: a test feeds the editor
            yield
            return
        try:
            self._be_quiet()
            keys = self._read()
            if keys and keys[-1].key is Keys.ControlJ:
                keys[-1] = KeyPress(Keys.ControlM, "\r")
            self._keep(keys)
            self.start()
            yield
        finally:
            self.stop()
            before, self._before = self._before, None
            self._give_back(before)

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Give the terminal to another program, with its original attributes."""
        listening = self._listening is not None
        self.stop()
        if self._before is not None:
            self._give_back(self._before)
        try:
            yield
        finally:
            if self._before is not None:
                self._be_quiet()
            if listening:
                self.start()

    def start(self) -> None:
        """Start reading: no editor is active. A Ctrl-C already typed becomes a signal."""
        if self._before is None or self._listening is not None:
            return
        self._keep(get_typeahead(self._input))
        self._be_quiet()  # a shell may have changed it, when it brought the chat to the foreground
        self._output.enable_bracketed_paste()  # else a paste would be several messages
        self._output.flush()
        self._woken, self._wake = os.pipe()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def stop(self) -> None:
        """Stop reading: an editor takes over, or the chat ends."""
        if self._listening is None:
            return
        os.write(self._wake, b".")
        self._listening.join()
        self._listening = None
        os.close(self._wake)
        os.close(self._woken)

    def waiting(self) -> list[KeyPress]:
        """Keys that the next editor will read first."""
        keys = [*get_typeahead(self._input), *self._read()]
        store_typeahead(self._input, keys)
        return keys

    def _give_back(self, attributes: list[Any]) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._output.disable_bracketed_paste()
            self._output.flush()  # before Ctrl-C can drop unread input again
            termios.tcsetattr(self._input.fileno(), termios.TCSANOW, attributes)

    def _be_quiet(self) -> None:
        """No echo, no editing, Enter stays Enter, Ctrl-C is a signal and drops no input."""
        quiet = termios.tcgetattr(self._input.fileno())
        quiet[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        quiet[tty.LFLAG] |= termios.ISIG | termios.NOFLSH
        quiet[tty.IFLAG] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        quiet[tty.CC][termios.VMIN], quiet[tty.CC][termios.VTIME] = 1, 0
        termios.tcsetattr(self._input.fileno(), termios.TCSANOW, quiet)

    def _listen(self) -> None:
        """Read continuously: an unread terminal buffer is full at 4 KB, and Ctrl-C is lost after that."""
        waits = select.poll()
        waits.register(self._woken, select.POLLIN)
        waits.register(self._input.fileno(), select.POLLIN)
        while True:
            found = dict(waits.poll())
            if self._woken in found or found[self._input.fileno()] != select.POLLIN:  # or the terminal is gone
                return
            if self._is_ours():
                self._keep(self._read())
            elif select.select([self._woken], [], [], BACKGROUND_S)[0]:  # the shell owns the input
                return

    def _is_ours(self) -> bool:
        """Return whether the chat is in the foreground; reading in the background would stop the process."""
        try:
            return os.tcgetpgrp(self._input.fileno()) == os.getpgrp()
        except OSError:
            return True

    def _read(self) -> list[KeyPress]:
        """Keys that can be read without waiting."""
        waits, keys = select.poll(), list[KeyPress]()
        waits.register(self._input.fileno(), select.POLLIN)
        while not self._input.closed and [event for _, event in waits.poll(0)] == [select.POLLIN]:
            keys += self._input.read_keys()
        return [key for key in keys if key.key is not Keys.CPRResponse]

    def _keep(self, keys: list[KeyPress]) -> None:
        """Store keys for the next editor; an unread Ctrl-C becomes a signal."""
        presses = (Keys.ControlC, Keys.SIGINT)
        store_typeahead(self._input, [key for key in keys if key.key not in presses])
        if any(key.key in presses for key in keys):
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
