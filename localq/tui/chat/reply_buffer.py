"""`ReplyBuffer`: text of a reply that is received and not drawn yet.

The screen polls it a few times a second, instead of handling a message for each of up to 600 tokens a second.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localq.stats import Stats

if TYPE_CHECKING:
    from localq.chat.reply import Reply, ReplyPiece

EVERY_S = 0.05  # between two polls


@dataclass(frozen=True)
class BufferedReply:
    """Text since the last poll. stats: the newest, None without news; reply: the end."""

    thought: str = ""
    text: str = ""
    stats: Stats | None = None
    notices: tuple[str, ...] = ()
    reply: Reply | None = None


class ReplyBuffer:
    """Buffer of one reply; `put` in one thread, `take` in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._notices: list[str] = []
        self._stats: Stats | None = None
        self._reply: Reply | None = None

    def put(self, part: ReplyPiece | Reply) -> None:
        """Add a part of the reply."""
        from localq.chat.reply import Reply  # start-up cost

        with self._lock:
            self._stats = part.stats
            if isinstance(part, Reply):
                self._reply = part
                self._notices += part.notices
                return
            if part.text:
                (self._thoughts if part.thinking else self._texts).append(part.text)
            if part.notice:
                self._notices.append(part.notice)

    def take(self) -> BufferedReply:
        """Return and clear the buffered text."""
        with self._lock:
            taken = BufferedReply(
                "".join(self._thoughts), "".join(self._texts), self._stats, tuple(self._notices), self._reply
            )  # fmt: skip
            self._thoughts, self._texts, self._notices, self._stats, self._reply = [], [], [], None, None
            return taken
