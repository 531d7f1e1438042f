"""`CallReader`: the text of a call while it arrives, read by generators that wait for more of it.

The reader of a format is a generator: it yields where it needs more text, raises `NotACall` where the text is none, and
returns the calls. So a format is written as if the text was whole, every character is looked at once, and the result
does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

from localq.text.tools.declaration import MAX_DEPTH

T = TypeVar("T")
Reading = Generator[None, None, T]
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
# Outside strings, JSON has these characters only; anything else ends the reading of text that is no JSON.
_NO_JSON = re.compile(r'[^-+.:,{}\[\]"\w \t\r\n]')


class NotACall(Exception):
    """The text that began as a call is none, or was broken off."""


class CallReader:
    """Text from the opening mark of a call on. at: what is read so far; ended: no more text comes."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.ended = text, 0, False

    @property
    def rest(self) -> str:
        """The text that is not read."""
        return self.text[self.at :]

    def more(self) -> Reading[None]:
        """Wait for more text."""
        if self.ended:
            raise NotACall
        yield

    def space(self) -> Reading[str]:
        """Read white space."""
        start = self.at
        while True:
            found = _SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def peek(self, *marks: str) -> Reading[str]:
        """The mark that comes next, the longest of several; "" for none. Nothing is read."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, marks))]
            if not self.ended and any(len(rest) < len(mark) and mark.startswith(rest) for mark in marks):
                yield
                continue
            return max((mark for mark in marks if rest.startswith(mark)), key=len, default="")

    def take(self, *marks: str) -> Reading[str]:
        """Read one of these marks, which must come next."""
        found = yield from self.peek(*marks)
        if not found:
            raise NotACall
        self.at += len(found)
        return found

    def skip(self, *marks: str) -> Reading[str]:
        """Read white space and one of these marks, if one is next; "" for none."""
        start = self.at
        yield from self.space()
        found = yield from self.peek(*marks)
        self.at = self.at + len(found) if found else start
        return found

    def close(self, mark: str, following: str) -> Reading[None]:
        """Read the mark that ends a whole call. None is needed at the end of a reply, and before `following`."""
        yield from self.space()
        if (found := (yield from self.peek(mark, following))) == following:
            return
        if not found and not (self.ended and mark.startswith(self.rest)):
            raise NotACall
        self.at += len(found) or len(self.rest)

    def until(self, *marks: str) -> Reading[tuple[str, str]]:
        """Read up to the first of these marks, and the mark; return both."""
        start = self.at
        look, longest = start, max(map(len, marks))
        while True:
            places = [(place, -len(mark), mark) for mark in marks if (place := self.text.find(mark, look)) >= 0]
            if places:
                place, _, mark = min(places)
                self.at = place + len(mark)
                return self.text[start:place], mark
            look = max(start, len(self.text) - longest + 1)
            yield from self.more()

    def run(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Read characters of a class, 1 to `most` of them, up to another character."""
        start = self.at
        while True:
            found = pattern.match(self.text, start)
            end = found.end() if found else start
            if end - start > most:
                raise NotACall
            if end < len(self.text) or (self.ended and end > start):
                self.at = end
                if end == start:
                    raise NotACall
                return self.text[start:end]
            yield from self.more()

    def balanced(self, opening: str = "{") -> Reading[str]:
        """Read a JSON object or array as it is written, by its brackets and strings."""
        yield from self.take(opening)
        start, depth = self.at - 1, 1
        while depth:
            found = _STRUCTURE.search(self.text, self.at)
            end = found.start() if found else len(self.text)
            if _NO_JSON.search(self.text, self.at, end):
                raise NotACall
            self.at = end
            if found is None:
                yield from self.more()
                continue
            self.at += 1
            if found[0] == '"':
                yield from self._string()
            else:
                depth += 1 if found[0] in "{[" else -1
                if depth > MAX_DEPTH:
                    raise NotACall
        return self.text[start : self.at]

    def quoted(self) -> Reading[str]:
        """Read a JSON string as it is written."""
        start = self.at
        yield from self.take('"')
        yield from self._string()
        return self.text[start : self.at]

    def unfinished(self, mark: str) -> int:
        """Length of the longest end of the text that may begin `mark`."""
        return next((size for size in range(len(mark) - 1, 0, -1) if self.text.endswith(mark[:size])), 0)

    def _string(self) -> Reading[None]:
        """Read the rest of a JSON string."""
        while True:
            found = _IN_STRING.search(self.text, self.at)
            if found is None:
                self.at = len(self.text)
            elif found[0] == '"':
                self.at = found.end()
                return
            elif found.end() < len(self.text):
                self.at = found.end() + 1
                continue
            else:
                self.at = found.start()
            yield from self.more()
