"""Stop strings: a reply ends before the first of them, also where one is spread over several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from localq.errors import usage_error

MOST, LONGEST = 16, 1000  # strings, characters of each


def validate(strings: Sequence[str]) -> tuple[str, ...]:
    """`strings`, or LocalqError (exit 2) where they cannot be stop strings."""
    if len(strings) > MOST:
        raise usage_error("--stop", f"{len(strings)} strings are too many", f"Give {MOST} at most.")
    for string in strings:
        if not 0 < len(string) <= LONGEST:
            why = f"a stop string has 1 to {LONGEST} characters, not {len(string)}"
            raise usage_error("--stop", why, 'Write it as it shall appear: --stop "###".')
    return tuple(strings)


class Matcher:
    """Text in, text out, up to the first stop string. What may be the beginning of one is held back until it is none.

    The pieces together are the text up to the first place where a stop string begins, however the text was cut.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None  # the stop string that was met

    def has_matched(self) -> bool:
        """A stop string was met: whatever comes is not part of the reply."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The part of the text so far that is certain now; nothing once a stop string was met."""
        if self.has_matched():
            return ""
        if not self._strings:
            return text
        self._held += text
        # The earliest beginning wins: one that is found waits for an earlier one that may still be completed.
        places = [(place, -len(s), s) for s in self._strings if (place := self._held.find(s)) >= 0]
        waiting = len(self._held) - self._unfinished()
        if places and min(places)[0] <= waiting:
            place, _, self.matched = min(places)
            piece, self._held = self._held[:place], ""
            return piece
        piece, self._held = self._held[:waiting], self._held[waiting:]
        return piece

    def finish(self, text: str = "") -> str:
        """The last `text` and what was held back; the reply is over."""
        piece = self.push(text)
        rest, self._held = self._held, ""
        places = [(place, -len(s), s) for s in self._strings if (place := rest.find(s)) >= 0]
        if places:
            place, _, self.matched = min(places)
            rest = rest[:place]
        return piece + rest

    def _unfinished(self) -> int:
        """Characters at the end of what is held that may be the beginning of a stop string: the longest such end."""
        longest = min(len(self._held), max(len(s) for s in self._strings) - 1)
        ends = (size for size in range(longest, 0, -1) if self._begins(self._held[-size:]))
        return next(ends, 0)

    def _begins(self, end: str) -> bool:
        return any(len(end) < len(s) and s.startswith(end) for s in self._strings)
