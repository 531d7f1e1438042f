"""Ctrl-C in the line chat: a press is held until something answers it, and raises only where that is wanted."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Presses:
    """Those that nothing has answered yet. A KeyboardInterrupt wherever a press happens to fall would end the chat:
    one that was meant for a reply falls behind its end, or before its beginning."""

    def __init__(self) -> None:
        self._held: list[bool] = []
        self._raises = False

    def hear(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        """One press; a signal's handler."""
        if self._raises:
            self._raises = False  # once: what puts things back is not interrupted again
            raise KeyboardInterrupt
        self._held.append(True)

    def taken(self) -> bool:
        """Whether there was a press, which is answered by whoever asks."""
        held, self._held = self._held, []  # a press that comes amid this is in one of the two
        return bool(held)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Signals are heard here."""
        before = signal.signal(signal.SIGINT, self.hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Within, a press raises KeyboardInterrupt, and so does one that is held."""
        self._raises = True
        try:
            if self.taken():
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False
