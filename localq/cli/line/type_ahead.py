"""What is typed while no line editor reads: it waits, unseen, for the next one, and a Ctrl-C acts at once.

In between prompt_toolkit leaves a terminal to the kernel's own editing. That writes what is typed amid a reply, makes
Ctrl-J of Enter, so that a message is not sent, and at a Ctrl-C throws away what waits: where that has the end of a
paste, the next editor takes every key for a part of the paste, Ctrl-C too.
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
BACKGROUND_S = 0.2  # as often as this a chat in the background looks whether the terminal is its own again


class Parser(Vt100Parser):
    """Knows kitty's keyboard protocol. A Ctrl-C ends a paste whose own end was lost; prompt_toolkit's takes it for a
    part of that, and all keys after it."""

    _cut = ""  # a key that has not come whole

    def feed(self, data: str) -> None:
        """As prompt_toolkit's."""
        data, self._cut = self._cut + data, ""
        while not self._in_bracketed_paste and (found := _PASTE_OR_KEY.search(data)) and found[0] != _PASTE:
            super().feed(data[: found.start()] + extended_keys.as_ever(found))
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
        """As prompt_toolkit's: nothing more comes of what has begun."""
        cut, self._cut = self._cut, ""
        super().feed(cut)
        super().flush()


class TypedAhead:
    """Reads the terminal from `start` to `stop`, for the editor that reads it next."""

    def __init__(self, input: Input, output: Output) -> None:
        self._input, self._output = input, output
        self._before: list[Any] | None = None  # what the terminal was like; None: it is not taken
        self._listening: threading.Thread | None = None
        self._wake, self._woken = -1, -1

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Has the terminal, from `start` on. What was typed while a model loaded is kept too: there the kernel has made
        Ctrl-J of every Enter, and the last key is taken for one."""
        try:
            self._before = termios.tcgetattr(self._input.fileno())
        except (termios.error, OSError, NotImplementedError):  # no terminal: the editor is fed by a test
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
    def aside(self) -> Iterator[None]:
        """Another program has the terminal, as it was before."""
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
        """No editor reads: a line has been typed, and is acted upon. A Ctrl-C behind that is one now."""
        if self._before is None or self._listening is not None:
            return
        self._keep(get_typeahead(self._input))
        self._be_quiet()  # somebody may have changed it, such as a shell that took the chat to the foreground
        self._output.enable_bracketed_paste()  # else a paste would be so many messages
        self._output.flush()
        self._woken, self._wake = os.pipe()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def stop(self) -> None:
        """An editor reads, or nobody."""
        if self._listening is None:
            return
        os.write(self._wake, b".")
        self._listening.join()
        self._listening = None
        os.close(self._wake)
        os.close(self._woken)

    def waiting(self) -> list[KeyPress]:
        """What the next editor will take first."""
        keys = [*get_typeahead(self._input), *self._read()]
        store_typeahead(self._input, keys)
        return keys

    def _give_back(self, attributes: list[Any]) -> None:
        with contextlib.suppress(OSError, termios.error):  # it may be gone
            self._output.disable_bracketed_paste()
            self._output.flush()  # before a Ctrl-C throws away again what nobody has read yet
            termios.tcsetattr(self._input.fileno(), termios.TCSANOW, attributes)

    def _be_quiet(self) -> None:
        """Keys are not shown and not edited, Enter is no Ctrl-J; Ctrl-C is a signal, and what waits stays."""
        quiet = termios.tcgetattr(self._input.fileno())
        quiet[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        quiet[tty.LFLAG] |= termios.ISIG | termios.NOFLSH
        quiet[tty.IFLAG] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        quiet[tty.CC][termios.VMIN], quiet[tty.CC][termios.VTIME] = 1, 0
        termios.tcsetattr(self._input.fileno(), termios.TCSANOW, quiet)

    def _listen(self) -> None:
        """A terminal of which nobody reads is full at 4 KB, and hears no Ctrl-C behind that."""
        waits = select.poll()
        waits.register(self._woken, select.POLLIN)
        waits.register(self._input.fileno(), select.POLLIN)
        while True:
            found = dict(waits.poll())
            if self._woken in found or found[self._input.fileno()] != select.POLLIN:  # or the terminal is gone
                return
            if self._is_ours():
                self._keep(self._read())
            elif select.select([self._woken], [], [], BACKGROUND_S)[0]:  # what is typed is the shell's
                return

    def _is_ours(self) -> bool:
        """In the background reading would stop the process; a terminal of another session has none."""
        try:
            return os.tcgetpgrp(self._input.fileno()) == os.getpgrp()
        except OSError:
            return True

    def _read(self) -> list[KeyPress]:
        """What can be read at once."""
        waits, keys = select.poll(), list[KeyPress]()
        waits.register(self._input.fileno(), select.POLLIN)
        while not self._input.closed and [event for _, event in waits.poll(0)] == [select.POLLIN]:
            keys += self._input.read_keys()
        return [key for key in keys if key.key is not Keys.CPRResponse]

    def _keep(self, keys: list[KeyPress]) -> None:
        """For the next editor; a Ctrl-C that the last one did not read becomes a signal."""
        presses = (Keys.ControlC, Keys.SIGINT)
        store_typeahead(self._input, [key for key in keys if key.key not in presses])
        if any(key.key in presses for key in keys):
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
