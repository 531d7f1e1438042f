"""`ReplyForm`: how one API writes a reply, whole or as server-sent events; and `Call`, what is asked of the slot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from localq.server.api.common import WholeReply
from localq.server.api_error import ApiError
from localq.server.events import ReplyEvent
from localq.server.request import ReplyRequest


class ReplyForm(Protocol):
    """The form of one reply. ping: a frame that keeps a connection open while nothing is said."""

    ping: str

    def whole(self, reply: WholeReply) -> dict[str, Any]:
        """The body of a response."""

    def frames(self, event: ReplyEvent) -> Iterator[str]:
        """Server-sent events for an event of the reply."""

    def failure(self, error: ApiError) -> str:
        """The last frames of a reply that has failed."""


@dataclass(frozen=True)
class Call:
    """A request of an API that is checked. model: as the client names it, "" for none; user: a name for its turns."""

    model: str
    request: ReplyRequest
    stream: bool
    form: ReplyForm
    user: str = ""


def frame(body: dict[str, Any], event: str = "") -> str:
    """One server-sent event."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event}\ndata: {text}\n\n" if event else f"data: {text}\n\n"
