"""Input priority: while a typed key waits to be shown, drawing the conversation waits.

It waits for `PATIENCE_S` at most, so that a key that is never handled (it went to a dialog) does not block drawing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from textual.events import Key
from textual.message import Message

PATIENCE_S = 0.05
EDITING = frozenset(("enter", "backspace", "tab", "up", "down", "left", "right"))  # not the keys of app actions


def is_typed(message: Message) -> bool:
    """Return whether a message is a key that edits text."""
    return isinstance(message, Key) and (message.is_printable or message.key in EDITING)


class InputPriority:
    """Counts waiting keys. `key_read` may be called in any thread; a race costs the priority of one key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._since_s = 0, 0.0

    def key_read(self) -> None:
        """A key was read."""
        if not self._count:
            self._since_s = self._clock()
        self._count += 1

    def key_handled(self) -> None:
        """A key was handled."""
        self._count = max(0, self._count - 1)

    def forget(self) -> None:
        """The whole screen is drawn, with the effect of all keys."""
        self._count = 0

    @property
    def is_waiting(self) -> bool:
        """True while keys wait, but no longer than `PATIENCE_S`."""
        return self._count > 0 and self._clock() - self._since_s < PATIENCE_S


class TakesInputFirst:
    """Mixin of a widget that reports its keys as handled itself (`InputPriorityScreen.draw_first`)."""
