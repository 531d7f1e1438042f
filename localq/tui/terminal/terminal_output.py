"""Writing to a terminal that may be gone: a window that was closed, a connection that broke.

Textual's thread that writes (8.2, drivers/_writer_thread.py) ends at the first error, and the app then waits for ever
for room in its queue, deaf to signals. Here what cannot be written is dropped, and the app is told once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TextIO


class TerminalFile:
    """`file`, which is a terminal, as Textual's writing thread takes it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._told = threading.Lock()
        self._ours = [each for each in (0, 1, 2) if os.isatty(each)]  # one that is gone is none any more

    def write(self, text: str) -> None:
        """As far as there is somebody to write to."""
        try:
            self._file.write(text)
        except (OSError, ValueError):
            self.hang_up()

    def flush(self) -> None:
        """As far as there is somebody to write to."""
        try:
            self._file.flush()
        except (OSError, ValueError):
            self.hang_up()

    def fileno(self) -> int:
        """Of the terminal."""
        return self._file.fileno()

    def isatty(self) -> bool:
        """It was one when it was opened."""
        return True

    def hang_up(self) -> None:
        """The terminal is no more: let everything that is still written go nowhere, and end as if it had hung up."""
        if not self._told.acquire(blocking=False):
            return
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in self._ours:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
        os.kill(os.getpid(), signal.SIGTERM)
