"""`ReplyBuffer`: text of a reply that is received and not drawn yet.

The screen polls it a few times a second, instead of handling a message for each of up to 600 tokens a second.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localq.sanitize import sanitize
from localq.stats import Stats
from localq.tui.chat.status_line import ASKING

if TYPE_CHECKING:
    from localq.chat.history.tool_rounds import ToolRound
    from localq.chat.reply import CallEvent, Reply, ReplyPiece

EVERY_S = 0.05  # between two polls


@dataclass(frozen=True)
class BufferedReply:
    """Text since the last poll. stats: the newest, None without news; reply: the end.

    rounds   parts of the reply that have ended in tool calls; `thought` and `text` follow them
    doing    what the reply is doing besides text, such as "running add"; empty while it streams
    """

    thought: str = ""
    text: str = ""
    stats: Stats | None = None
    notices: tuple[str, ...] = ()
    reply: Reply | None = None
    rounds: tuple[ToolRound, ...] = ()
    doing: str = ""


class ReplyBuffer:
    """Buffer of one reply; `put` in one thread, `take` in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._notices: list[str] = []
        self._stats: Stats | None = None
        self._reply: Reply | None = None
        self._rounds: list[ToolRound] = []
        self._doing = ""

    def put(self, part: ReplyPiece | Reply) -> None:
        """Add a part of the reply."""
        from localq.chat.reply import Reply  # start-up cost

        with self._lock:
            self._stats = part.stats
            if isinstance(part, Reply):
                self._reply = part
                self._notices += part.notices
                return
            if part.event is not None:
                self._doing = _phase(part.event)
            if part.round is not None:  # it has the text so far
                self._rounds.append(part.round)
                self._thoughts, self._texts = [], []
            if part.text:
                (self._thoughts if part.thinking else self._texts).append(part.text)
            if part.notice:
                self._notices.append(part.notice)

    def take(self) -> BufferedReply:
        """Return and clear the buffered text."""
        with self._lock:
            taken = BufferedReply(
                "".join(self._thoughts), "".join(self._texts), self._stats, tuple(self._notices), self._reply,
                tuple(self._rounds), self._doing,
            )  # fmt: skip
            self._thoughts, self._texts, self._notices, self._stats, self._reply = [], [], [], None, None
            self._rounds = []
            return taken


def _phase(event: CallEvent) -> str:
    """The state of the reply after the event of a tool call."""
    if event.outcome:
        return ""
    return ASKING if event.asks else f"running {sanitize(event.tool)}"
