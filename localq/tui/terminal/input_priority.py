"""Keys before all else that is drawn: what has been read of the keyboard and was not answered on the screen yet.

A conversation takes longer to lay out and draw than a letter; while one waits, the conversation does, for `PATIENCE_S`
at most, so that a key that is never answered (it has gone to a dialog) holds nothing up for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from textual.events import Key
from textual.message import Message

PATIENCE_S = 0.05
EDITING = frozenset(("enter", "backspace", "tab", "up", "down", "left", "right"))  # no keys of the app's


def is_typed(message: Message) -> bool:
    """Whether it is a key that changes what is being written."""
    return isinstance(message, Key) and (message.is_printable or message.key in EDITING)


class InputPriority:
    """Keys that wait. `came` may be called in any thread; what is lost where two meet is one key's precedence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._since_s = 0, 0.0

    def key_read(self) -> None:
        """One was read."""
        if not self._count:
            self._since_s = self._clock()
        self._count += 1

    def key_handled(self) -> None:
        """One was done."""
        self._count = max(0, self._count - 1)

    def forget(self) -> None:
        """All of the screen is drawn now, and with it whatever came of them."""
        self._count = 0

    @property
    def is_waiting(self) -> bool:
        """There are some, and they have not waited too long."""
        return self._count > 0 and self._clock() - self._since_s < PATIENCE_S


class TakesInputFirst:
    """Mixin of a widget that reports its own keys as done (`InputPriorityScreen.draw_first`)."""
