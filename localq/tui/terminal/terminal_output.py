"""Terminal output that survives a closed window or a broken connection.

Textual's writer thread (8.2, drivers/_writer_thread.py) ends at the first error, and the app then waits for ever for
room in its queue, without handling signals. Here output is dropped after an error, and the app is ended by a signal.
A process that is ended by force resets the terminal by `reset`, without the app.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
from typing import Any, TextIO

# Turns off what Textual's driver turns on: synchronized output, mouse, focus, resizes in band, bracketed paste, no line
# wrap, kitty's keyboard protocol, the alternate screen, the hidden cursor.
RESET = b"\x1b[?2026l" + b"".join(b"\x1b[?%dl" % mode for mode in (1000, 1002, 1003, 1015, 1006, 1004, 2048, 2004))
RESET += b"\x1b[?7h\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m"
RESET_WITHIN_S = 0.5  # a blocked terminal takes no output


def reset(terminal: int, attributes: list[Any] | None) -> None:
    """Reset the `terminal`, a descriptor, and its attributes of termios; does nothing if it is gone or blocked."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        if select.select([], [terminal], [], RESET_WITHIN_S)[1]:
            os.write(terminal, RESET)
        if attributes is not None:
            termios.tcsetattr(terminal, termios.TCSANOW, attributes)


class TerminalFile:
    """A terminal as a file for Textual's writer thread."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._hung_up = threading.Lock()
        self._ours = [each for each in (0, 1, 2) if os.isatty(each)]  # isatty is False after a hang-up

    def write(self, text: str) -> None:
        """Write, unless the terminal is gone."""
        try:
            self._file.write(text)
        except (OSError, ValueError):
            self.hang_up()

    def flush(self) -> None:
        """Flush, unless the terminal is gone."""
        try:
            self._file.flush()
        except (OSError, ValueError):
            self.hang_up()

    def fileno(self) -> int:
        """Descriptor of the terminal."""
        return self._file.fileno()

    def isatty(self) -> bool:
        """Always True: it was a terminal when opened."""
        return True

    def hang_up(self) -> None:
        """Discard all further output, and end the app as after a hang-up."""
        if not self._hung_up.acquire(blocking=False):
            return
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in self._ours:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
        os.kill(os.getpid(), signal.SIGTERM)
