"""Stop strings: a reply ends before the first of them, also where one spans several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from localq.errors import usage_error

MOST, LONGEST = 16, 1000  # strings, and characters of each


def validate(strings: Sequence[str]) -> tuple[str, ...]:
    """Return `strings`. Raises LocalqError (exit 2) for too many, empty or too long ones."""
    if len(strings) > MOST:
        raise usage_error("--stop", f"too many stop strings ({len(strings)})", f"Use at most {MOST}.")
    for string in strings:
        if not 0 < len(string) <= LONGEST:
            why = f"a stop string must be 1 to {LONGEST} characters long; this one has {len(string)}"
            raise usage_error("--stop", why, 'Example: --stop "###".')
    return tuple(strings)


class Matcher:
    """Text in, text out, up to the first stop string; a possible beginning of one is held back.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def has_matched(self) -> bool:
        """True once a stop string was found: later text is not part of the reply."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Add text; return what is final now; "" once a stop string was found."""
        if self.has_matched():
            return ""
        if not self._strings:
            return text
        self._held += text
        # The earliest beginning wins: a found string waits for an earlier one that may still be completed.
        places = [(place, -len(s), s) for s in self._strings if (place := self._held.find(s)) >= 0]
        waiting = len(self._held) - self._unfinished()
        if places and min(places)[0] <= waiting:
            place, _, self.matched = min(places)
            piece, self._held = self._held[:place], ""
            return piece
        piece, self._held = self._held[:waiting], self._held[waiting:]
        return piece

    def finish(self, text: str = "") -> str:
        """Add the last text and end the reply; return the rest."""
        piece = self.push(text)
        rest, self._held = self._held, ""
        places = [(place, -len(s), s) for s in self._strings if (place := rest.find(s)) >= 0]
        if places:
            place, _, self.matched = min(places)
            rest = rest[:place]
        return piece + rest

    def _unfinished(self) -> int:
        """Length of the longest end of the held text that may begin a stop string."""
        longest = min(len(self._held), max(len(s) for s in self._strings) - 1)
        ends = (size for size in range(longest, 0, -1) if self._begins(self._held[-size:]))
        return next(ends, 0)

    def _begins(self, end: str) -> bool:
        return any(len(end) < len(s) and s.startswith(end) for s in self._strings)
