"""`ResponseStore`: conversations that `/v1/responses` goes on with by `previous_response_id`; in memory, bounded."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from localq.server.request import ChatMessage

MOST, MOST_CHARACTERS = 256, 8 * 2**20
MOST_MESSAGES = 2**15  # and calls in them: an empty one takes memory too


class ResponseStore:
    """The last responses with the messages before them. What exceeds the limits is forgotten, the oldest first.

    Used by the event loop alone.
    """

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: collections.OrderedDict[str, tuple[ChatMessage, ...]] = collections.OrderedDict()
        self._characters = self._messages = 0

    def find(self, id: str) -> tuple[ChatMessage, ...] | None:
        """The messages up to a response, and its own; None where it is not kept."""
        found = self._kept.get(id)
        if found is not None:
            self._kept.move_to_end(id)
        return found

    def keep(self, id: str, messages: Sequence[ChatMessage]) -> None:
        """Keep a response."""
        self._kept[id] = tuple(messages)
        self._characters += _size(messages)
        self._messages += _count(messages)
        while self._kept and self._is_full():
            _, forgotten = self._kept.popitem(last=False)
            self._characters -= _size(forgotten)
            self._messages -= _count(forgotten)

    def _is_full(self) -> bool:
        is_long = self._characters > self._most_characters or self._messages > MOST_MESSAGES
        return is_long or len(self._kept) > self._most


def _count(messages: Sequence[ChatMessage]) -> int:
    return sum(1 + len(each.calls) for each in messages)


def _size(messages: Sequence[ChatMessage]) -> int:
    return sum(
        len(each.text) + len(each.thought) + sum(len(arguments) for _, _, arguments in each.calls) for each in messages
    )
