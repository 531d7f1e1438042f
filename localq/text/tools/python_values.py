"""Values as Python writes them, and calls as it writes them: `f(a=1, b='x')`; read without running anything.

Values become JSON text. `true`, `false` and `null` are known beside Python's own words, a bare word is a string. A
quote ends a string where a comma, a colon, a bracket or the end follows: some templates write strings without escapes.
"""

from __future__ import annotations

import math
import re

from localq.text.tools import json_text
from localq.text.tools.declaration import MAX_DEPTH
from localq.text.tools.reader import NotACall

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,:=()\[\]{}\"']+")
NAME = re.compile(r"[A-Za-z_][\w.-]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?\Z")
_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F_]{1,40}|[\d_]{1,400}(?:\.[\d_]*)?(?:[eE][-+]?\d{1,4})?|\.\d{1,400})\Z")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
_CODES = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_ENDS = ",:)]}"


def word(text: str) -> str:
    """JSON text of a value without quotes and brackets: a word, a number, else a string."""
    if text in _WORDS or _JSON_NUMBER.match(text):
        return _WORDS.get(text, text)
    if _NUMBER.match(text):
        try:
            is_whole = text.lstrip("+-").lower().startswith("0x") or not set(text) & set(".eE")
            number = int(text, 0) if is_whole else float(text)
        except ValueError:
            return json_text.dump(text)
        return json_text.dump(number if math.isfinite(number) else text)
    return json_text.dump(text)


def load(text: str) -> str:
    """JSON text of one value. Raises NotACall where `text` is none."""
    parser = PythonText(text)
    found = parser.value(0)
    parser.end()
    return found


class PythonText:
    """Text of calls and values, read from the start."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def end(self) -> None:
        """Raise NotACall where more than white space is left."""
        self._space()
        if self._at < len(self._text):
            raise NotACall

    def calls(self) -> list[tuple[str, str]]:
        """Names and arguments of a list of calls, or of one call."""
        found = []
        if self.skip("["):
            while not self.skip("]"):
                found.append(self.call())
                self.skip(",")
        else:
            found.append(self.call())
        self.end()
        return found

    def call(self) -> tuple[str, str]:
        """Name and arguments of a call."""
        name = self._match(NAME)
        self._take("(")
        parts: list[tuple[str, str]] = []
        while not self.skip(")"):
            key = self._match(NAME)
            self._take("=")
            parts.append((key, self.value(1)))
            if not self.skip(","):
                self._take(")")
                break
        return name, json_text.object_text(parts)

    def value(self, depth: int) -> str:
        """JSON text of a value."""
        if depth > MAX_DEPTH:
            raise NotACall
        self._space()
        first = self._text[self._at : self._at + 1]
        if first in ("'", '"') and first:
            return json_text.dump(self._string(first))
        if first in ("[", "(") and first:
            return self._list(depth, "]" if first == "[" else ")")
        if first == "{":
            return self._table(depth)
        return word(self._match(_WORD))

    def skip(self, mark: str) -> bool:
        """Read white space and `mark`, if it is next."""
        self._space()
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def _list(self, depth: int, closing: str) -> str:
        self._at += 1
        parts: list[str] = []
        while not self.skip(closing):
            parts.append(self.value(depth + 1))
            if not self.skip(","):
                self._take(closing)
                break
        return "[" + ", ".join(parts) + "]"

    def _table(self, depth: int) -> str:
        self._at += 1
        parts: list[tuple[str, str]] = []
        while not self.skip("}"):
            key = self.value(depth + 1)
            self._take(":")
            parts.append((_key(key), self.value(depth + 1)))
            if not self.skip(","):
                self._take("}")
                break
        return json_text.object_text(parts)

    def _string(self, quote: str) -> str:
        """The text of a string; a quote in it that nothing shows to be its end is a part of it."""
        triple = quote * 3
        closing = triple if self._text.startswith(triple, self._at) and not self._ends_at(self._at + 2) else quote
        self._at += len(closing)
        parts: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "\\":
                parts.append(self._escape())
            elif self._text.startswith(closing, self._at) and self._ends_at(self._at + len(closing)):
                self._at += len(closing)
                return "".join(parts)
            else:
                parts.append(char)
                self._at += 1
        raise NotACall

    def _ends_at(self, at: int) -> bool:
        """Return whether a value can have ended before `at`."""
        found = _SPACE.match(self._text, at)
        after = self._text[found.end() if found else at :][:1]
        return not after or after in _ENDS

    def _escape(self) -> str:
        """The character of an escape sequence; an unknown escape stays as it is."""
        char = self._text[self._at + 1 : self._at + 2]
        code = _CODES.match(self._text, self._at + 1)
        if code is not None and (value := int(code[1] or code[2] or code[3], 16)) <= 0x10FFFF:
            self._at = code.end()
            return chr(value)
        self._at += 1 + len(char)
        return _ESCAPES.get(char, "\\" + char)

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._space()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise NotACall
        self._at = found.end()
        return found[0]

    def _take(self, mark: str) -> None:
        if not self.skip(mark):
            raise NotACall

    def _space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at


def _key(text: str) -> str:
    """The key of a table from the JSON text of its value."""
    value = json_text.load(text)
    return value if isinstance(value, str) else text
