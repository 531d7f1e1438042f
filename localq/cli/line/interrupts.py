"""Ctrl-C in the line chat: a press stays pending until it is handled, and raises only where safe."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """Pending presses of Ctrl-C.

    A KeyboardInterrupt at an arbitrary point would end the chat: a press meant for a reply may come just before or
    after it.
    """

    def __init__(self) -> None:
        self._held: list[bool] = []
        self._raises = False

    def add(self, number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        """Handle one press; usable as a signal handler."""
        if self._raises:
            self._raises = False  # once: clean-up code is not interrupted again
            raise KeyboardInterrupt
        self._held.append(True)

    def take(self) -> bool:
        """Return whether a press is pending, and clear it."""
        held, self._held = self._held, []  # a press at this moment is in one of the two
        return bool(held)

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Collect SIGINT as presses inside."""
        before = signal.signal(signal.SIGINT, self.add)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def raise_inside(self) -> Iterator[None]:
        """Raise KeyboardInterrupt for a press inside, and at once for a pending one."""
        self._raises = True
        try:
            if self.take():
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False
