r"""Perl classes of a regular expression as ASCII: `\d`, `\w`, `\s` and their complements, as most engines read them.

Rust's regex, which llguidance uses, reads them as Unicode by default: `\d` then matches the digits of every script.
`(?u)` selects that for the group that it stands in; `.`, literals and `\p{...}` are Unicode in any case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\v\f\r\x20"}
_UNICODE = {"d": r"\p{Nd}", "w": r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}", "s": r"\p{White_Space}"}
_FLAGS = re.compile(r"\(\?([A-Za-z]*)(?:-([A-Za-z]*))?([:)])")
_CLASS_START = re.compile(r"\[\^?\]?")  # a ] right after the start is a literal


@dataclass(frozen=True)
class _Flags:
    """Flags that are in force. unicode None: not named, so the classes are ASCII."""

    unicode: bool | None = None
    verbose: bool = False
    ignore_case: bool = False

    def changed(self, on: str, off: str) -> _Flags:
        """These flags after an inline group turned `on` and `off` some."""
        named = {**dict.fromkeys(off, False), **dict.fromkeys(on, True)}
        return _Flags(named.get("u", self.unicode), named.get("x", self.verbose), named.get("i", self.ignore_case))


def ascii_classes(pattern: str, spell_unicode: bool = False) -> str:
    r"""`pattern` with its Perl classes as ASCII, outside `(?u)`. A malformed pattern stays malformed.

    spell_unicode   under `(?u)` write the classes as \p{...}: for JSON schemas, where llguidance reads \d as ASCII
    """
    return _Rewriter(pattern, spell_unicode).rewrite()


class _Rewriter:
    """One pass over a pattern. groups: flags of the open groups, the innermost last; depth: open character classes."""

    def __init__(self, pattern: str, spell_unicode: bool) -> None:
        self.pattern, self.spell_unicode = pattern, spell_unicode
        self.groups, self.depth = [_Flags()], 0

    def rewrite(self) -> str:
        """The whole pattern."""
        out, place = [], 0
        while place < len(self.pattern):
            taken, written = self._next(place)
            out.append(written)
            place += taken
        return "".join(out)

    def _next(self, place: int) -> tuple[int, str]:
        """(characters consumed, text written) at `place`."""
        letter = self.pattern[place]
        if letter == "\\":
            both = self.pattern[place : place + 2]
            return 2, self._escape(both[1:]) or both
        if letter == "[":
            start = _CLASS_START.match(self.pattern, place)
            assert start is not None
            self.depth += 1
            return len(start[0]), start[0]
        if letter == "]":
            self.depth = max(0, self.depth - 1)
        elif not self.depth:
            return self._outside(place, letter)
        return 1, letter

    def _outside(self, place: int, letter: str) -> tuple[int, str]:
        """As `_next`, outside a character class."""
        if letter == "(":
            return self._group(place)
        if letter == ")" and len(self.groups) > 1:
            self.groups.pop()
        elif letter == "#" and self.groups[-1].verbose:
            end = self.pattern.find("\n", place)
            comment = self.pattern[place:] if end < 0 else self.pattern[place:end]
            return len(comment), comment
        return 1, letter

    def _group(self, place: int) -> tuple[int, str]:
        found = _FLAGS.match(self.pattern, place)
        if found is None:
            self.groups.append(self.groups[-1])
            return 1, "("
        flags = self.groups[-1].changed(found[1], found[2] or "")
        if found[3] == ":":
            self.groups.append(flags)
        else:
            self.groups[-1] = flags
        return len(found[0]), found[0]

    def _escape(self, letter: str) -> str:
        """Return the replacement for the escape of `letter`; empty: it stays."""
        kind, flags = letter.lower(), self.groups[-1]
        if kind not in _ASCII or (flags.unicode is not None and not self.spell_unicode):
            return ""
        members = (_UNICODE if flags.unicode else _ASCII)[kind]
        inside = f"[{'^' * letter.isupper()}{members}]"
        # Without case, Unicode folds k and s to the Kelvin sign and the long s.
        is_folded = kind == "w" and flags.ignore_case and not flags.unicode and not self.depth
        return f"(?-i:{inside})" if is_folded else inside
