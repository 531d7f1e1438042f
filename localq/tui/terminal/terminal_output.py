"""Terminal output that survives a closed window or a broken connection.

Textual's writer thread (8.2, drivers/_writer_thread.py) ends at the first error, and the app then waits for ever for
room in its queue, without handling signals. Here output is dropped after an error, and the app is ended by a signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TextIO


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
