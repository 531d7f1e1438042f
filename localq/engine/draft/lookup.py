"""Prompt look-up: where the last tokens of a text stand earlier in it, and what follows them there.

The index is extended token by token, in about a microsecond each, and truncated the same way. A match is found by its
last `LEAST` tokens and measured backwards; of the `TRIES` latest positions the longest match wins, and the latest of
equal ones. A match is kept as long as the next token continues it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEAST = 3  # tokens of the shortest match
LONGEST = 48  # up to which a match is measured
TRIES = 8  # places that are measured


class Match(NamedTuple):
    """An earlier place in the text.

    length   tokens before it that equal the last ones of the text
    behind   position of the token that follows them
    """

    length: int
    behind: int


class LookupIndex:
    """A text and the places of its runs of `LEAST` tokens."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # run -> position behind the latest one
        self._earlier: list[int] = []  # by position behind a run, less 1: that of the one before; 0: there is none
        self._match: Match | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        """The text."""
        return self._ids

    def push(self, token: int) -> None:
        """Add a token to the text."""
        match = self._match
        continues = match is not None and self._ids[match.behind] == token
        self._ids.append(token)
        end = len(self._ids)
        run = tuple(self._ids[-LEAST:])
        earlier = self._latest.get(run, 0) if end >= LEAST else 0
        self._earlier.append(earlier)
        if end >= LEAST:
            self._latest[run] = end
        if match is not None and continues:
            self._match = Match(match.length + 1, match.behind + 1)
        else:
            self._match = self._longest(end, earlier) if earlier else None

    def begin(self, ids: Iterable[int]) -> None:
        """Take the text `ids`; what it shares with the text before stays indexed."""
        wanted = list(ids)
        shared, most = 0, min(len(wanted), len(self._ids))
        if wanted[:most] == self._ids[:most]:
            shared = most
        else:
            while wanted[shared] == self._ids[shared]:
                shared += 1
        self.cut(shared)
        for token in wanted[shared:]:
            self.push(token)

    def cut(self, length: int) -> None:
        """Cut the text to its first `length` tokens."""
        self._match = None
        if not length:
            self._ids, self._latest, self._earlier = [], {}, []
        while len(self._ids) > length:
            end = len(self._ids)
            earlier = self._earlier.pop()
            if end >= LEAST:
                run = tuple(self._ids[-LEAST:])
                if earlier:
                    self._latest[run] = earlier
                else:
                    del self._latest[run]
            self._ids.pop()

    def match(self) -> Match | None:
        """Return the place where the last tokens stand earlier; None if there is none."""
        return self._match

    def following(self, match: Match, count: int) -> list[int]:
        """Return `count` tokens that follow `match`; past the end of the text, the draft repeats itself."""
        found = self._ids[match.behind : match.behind + count]
        period = len(self._ids) - match.behind
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _longest(self, end: int, place: int) -> Match:
        best = Match(0, 0)
        for _ in range(TRIES):
            length = self._length(place, end)
            if length > best.length:
                best = Match(length, place)
            place = self._earlier[place - 1]
            if not place:
                break
        return best

    def _length(self, place: int, end: int) -> int:
        """Tokens before `place` that equal those before `end`, of which the last LEAST do."""
        ids, length = self._ids, LEAST
        most = min(LONGEST, place)
        while length < most and ids[place - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length
