"""`ToolChannels`: channels of a reply with tools: thoughts, the answer, and messages to tools (`harmony`).

A message with a recipient other than the user and the model itself is one to a tool: of gpt-oss in the commentary
channel (`to=functions.NAME`), of Muse Glimmer to the name of a tool. It ends with `<|call|>` or `<|eom|>`, or with the
reply, whose last mark is a stop token. Text of the commentary channel without a recipient is part of the thought, as
gpt-oss's template takes it back.

Messages may follow the answer here. So `ChannelDetokenizer` escapes what looks like a mark in every message, and this
class takes the escape out of answers and calls: an argument may hold any text.
"""

from __future__ import annotations

import re

from localq.text import harmony

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_PEOPLE = ("user", "self", "assistant", "all")
_HELD = (harmony.BROKEN[:2], harmony.BROKEN[:1])  # an escape that may go on


class ToolChannels(harmony.Channels):
    """Text in, (thought, answer) out, and messages to tools from `take_messages`."""

    def __init__(self) -> None:
        super().__init__()
        self._recipient = ""  # of the message, where it is one to a tool
        self._message = ""
        self._messages: list[tuple[str, str]] = []

    def take_messages(self) -> list[tuple[str, str]]:
        """Recipient and text of the messages to tools that have ended since the last time."""
        taken, self._messages = self._messages, []
        return taken

    @property
    def in_header(self) -> bool:
        """True while the last message has no text yet: its header is not complete."""
        return self._in_header

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return what is final now of thought and answer."""
        self._held += text
        thought = answer = ""
        while self._held:
            before = len(self._held)
            if self._in_header:
                self._read_header()
            elif self._recipient or not self.thinking:
                answer += self._more_text()
            else:
                thought += self._more_thought()
            if len(self._held) == before:
                break
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """End the reply; return the held text. A message to a tool ends with it."""
        held, self._held = self._held, ""
        if self._in_header:
            return "", ""
        if not self._recipient and self.thinking:
            self.head += held
            return self._apart(held), ""
        answer = self._add(held)
        self._end_message()
        return "", answer

    def _read_header(self) -> None:
        header, mark, _ = self._held.partition(harmony.MESSAGE)
        super()._read_header()
        if mark:
            found = _RECIPIENT.search(header)
            self._recipient = "" if found is None or found[1] in _PEOPLE else found[1]
            self.thinking = self.thinking and not self._recipient

    def _more_text(self) -> str:
        """Read on in the answer, or in a message to a tool; return text of the answer."""
        places = [place for mark in harmony.MARKS if (place := self._held.find(mark)) >= 0]
        end = min(places, default=len(self._held) - harmony.unfinished(self._held))
        if not places:
            end -= next((len(each) for each in _HELD if self._held[:end].endswith(each)), 0)
        text, self._held = self._held[:end], self._held[end:]
        answer = self._add(text)
        if places:
            self._end_message()
            self._in_header = True
        return answer

    def _add(self, text: str) -> str:
        plain = text.replace(harmony.BROKEN, "<|")
        if not self._recipient:
            return plain
        self.head += text
        self._message += plain
        return ""

    def _end_message(self) -> None:
        if self._recipient:
            self._messages.append((self._recipient, self._message))
        self._recipient = self._message = ""
