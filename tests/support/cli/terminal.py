"""A terminal in which a test runs a program: a pty, a screen (pyte), keys, resizes, and what was written.

Waiting is always for something: a text on the screen, silence, the end. A terminal that answers is part of it: programs
ask for the cursor's place, the modes and the kind of terminal, and wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte

from tests.support.cli.terminal_stream import Modes, Reader, Token

WAIT_S = 30.0
CATCH_UP_S, SILENCE_S = 0.2, 0.02  # with what is written without end; what the kernel may take to hand it over
CTRL_C, CTRL_D, ESCAPE, ENTER = "\x03", "\x04", "\x1b", "\r"
_ASKED = {"\x1b[c": "\x1b[?62;22c", "\x1b[0c": "\x1b[?62;22c", "\x1b[5n": "\x1b[0n", "\x1b[>q": "\x1bP>|test\x1b\\"}
_MODE_ASKED = re.compile("\x1b\\[\\?([0-9]+)\\$p\\Z")
_FOR_PYTE = re.compile("\x1b\\[\\??[0-9;]*[@-Za-bd-hl-mr`]\\Z")


class Gave(AssertionError):
    """The program ended, or what was waited for did not come; shows the screen."""


class Terminal:
    """A program in a pty. `raw` is all that it wrote, `modes` what is switched on, `screen` what is seen."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], size: tuple[int, int] = (80, 24),
        folder: Path | None = None, stdin: int | None = None, stdout: int | None = None,
    ) -> None:  # fmt: skip
        """size: columns and rows. stdin, stdout: other descriptors than the terminal's."""
        self.master, self.slave = pty.openpty()
        self.raw, self.modes, self.reader = bytearray(), Modes(), Reader()
        self.foreign: list[Token] = []  # strings to the terminal: OSC, DCS and their like
        self.screen = pyte.HistoryScreen(*size, history=2000, ratio=0.5)
        self.stream = pyte.Stream(self.screen)
        self.on_token: Callable[[Token], None] | None = None
        self.resize(*size, tell=False)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            list(command), env=dict(environment), cwd=folder, preexec_fn=self._take,
            stdin=self.slave if stdin is None else stdin, stdout=self.slave if stdout is None else stdout,
            stderr=self.slave,
        )  # fmt: skip
        os.set_blocking(self.master, False)

    def _take(self) -> None:
        os.setsid()
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # ---- what is seen

    def read(self, seconds: float = 0.0) -> bool:
        """Take what has been written within `seconds`; whether there was anything."""
        ready, _, _ = select.select([self.master], [], [], max(0.0, seconds))
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except (BlockingIOError, OSError):
            return False
        self.take(data)
        return True

    def take(self, data: bytes) -> None:
        """See what was written."""
        self.raw += data
        for token in self.reader.feed(data):
            self._see(token)

    def _see(self, token: Token) -> None:
        self.modes.see(token)
        if self.on_token is not None:
            self.on_token(token)
        if token.kind in ("text", "control"):
            self.stream.feed(token.text)
        elif token.kind == "csi":
            self._sequence(token.text)
        elif token.kind != "escape":
            self.foreign.append(token)
        elif token.text in ("\x1b7", "\x1b8", "\x1bD", "\x1bE", "\x1bM", "\x1bc"):
            self.stream.feed(token.text)

    def _sequence(self, text: str) -> None:
        if text == "\x1b[6n":
            self._answer(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")
        elif text in _ASKED:
            self._answer(_ASKED[text])
        elif mode := _MODE_ASKED.match(text):
            self._answer(f"\x1b[?{mode[1]};{2 if mode[1] == '2026' else 0}$y")
        elif text.startswith("\x1b[?1049"):  # pyte has no second screen: an empty one is what a program finds
            self.screen.erase_in_display(2)
        elif _FOR_PYTE.match(text):
            with contextlib.suppress(UnboundLocalError, TypeError):  # of pyte, on parameters that mean nothing
                self.stream.feed(text)

    def _answer(self, text: str) -> None:
        self.send(text)

    @property
    def text(self) -> str:
        """The screen, one line per row."""
        return "\n".join(self._line(self.screen.buffer[y]) for y in range(self.screen.lines))

    @property
    def scrolled(self) -> str:
        """What has left the screen at the top, and the screen."""
        return "\n".join([*map(self._line, self.screen.history.top), self.text])

    def _line(self, row: Mapping[int, pyte.screens.Char]) -> str:
        """The second half of a wide character is empty; so is what is left of one that was half overwritten."""
        return "".join(row[x].data for x in range(self.screen.columns)).rstrip()

    # ---- what is done

    def send(self, keys: str | bytes, patience_s: float = WAIT_S) -> None:
        """Type; what the program does not take yet is offered again while its output is read, and dropped at last."""
        data = keys if isinstance(keys, bytes) else keys.encode("utf-8", "surrogateescape")
        deadline = time.monotonic() + patience_s
        while data:
            try:
                data = data[os.write(self.master, data[:4096]) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return
                self.read(0.01)
            except OSError:  # it is gone
                return

    def catch_up(self) -> None:
        """Read what is written already. A terminal does at once; what is not read yet the kernel throws away where it
        hears a Ctrl-C itself, such as the end of a mode from a program that is leaving."""
        end = time.monotonic() + CATCH_UP_S
        while self.read(SILENCE_S) and time.monotonic() < end:
            pass

    def resize(self, columns: int, rows: int, tell: bool = True) -> None:
        """As a window that is dragged: the new size, then SIGWINCH by the kernel."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:
            self.screen.resize(rows, columns)

    def until(self, wanted: str | Callable[[], bool], seconds: float = WAIT_S) -> float:
        """Wait for a text on the screen, or for a condition; seconds that it took."""
        start = time.monotonic()
        holds = (lambda: wanted in self.text) if isinstance(wanted, str) else wanted
        while not holds():
            left = start + seconds - time.monotonic()
            if left <= 0:
                raise Gave(f"not seen within {seconds:g} s: {wanted!r}; on the screen:\n{self.text}")
            if (
                not self.read(min(left, 0.05))
                and self.process.poll() is not None
                and not self.read(0.0)
                and not holds()
            ):
                raise Gave(f"ended with {self.process.returncode} before {wanted!r} was seen:\n{self.scrolled}")
        return time.monotonic() - start

    def settle(self, silence_s: float = 0.15, seconds: float = WAIT_S) -> None:
        """Until it has written something since the last read, and then nothing for `silence_s`."""
        start = time.monotonic()
        self.until(lambda: self.read(0.05), seconds)
        while self.read(silence_s):
            if time.monotonic() - start > seconds:
                raise Gave(f"it has not stopped writing for {seconds:g} s; on the screen:\n{self.text}")

    def wait(self, seconds: float = WAIT_S) -> int:
        """Read until the program has ended; its return code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise Gave(f"it has not ended within {seconds:g} s; on the screen:\n{self.text}")
            self.read(0.02)
        while self.read(0.0):
            pass
        for token in self.reader.finish():
            self._see(token)
        return self.process.returncode

    def left_behind(self) -> list[str]:
        """What the program, which has ended, has not put back."""
        after, found = termios.tcgetattr(self.slave), self.modes.left()
        names = ("iflag", "oflag", "cflag", "lflag", "ispeed", "ospeed", "cc")
        return found + [f"termios {name}" for name, a, b in zip(names, self.before, after, strict=True) if a != b]

    def close(self) -> None:
        """End what still runs, with all its group."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for descriptor in (self.master, self.slave):
            os.close(descriptor)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
