"""Keys of the objects in a JSON text that is still being written, so that none of them is written twice.

A grammar cannot exclude a second key of the same name where an object takes any key; the set of keys so far can.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

_QUOTE, _BACKSLASH = ord('"'), ord("\\")


@dataclass
class KeyScanner:
    """Bytes in, keys out: a scanner of valid JSON. Bytes that are not JSON are ignored.

    objects   keys of the open objects, the innermost last; None for an open array
    text      bytes of the string that is open; None outside a string
    is_key    the open string is a key
    repeats   a key was written twice
    """

    objects: list[set[str] | None] = field(default_factory=list)
    text: bytearray | None = None
    is_key: bool = False
    repeats: bool = False
    _expects_key: bool = False
    _is_escaped: bool = False

    @property
    def has_keys(self) -> bool:
        """True if an open object has keys already."""
        return any(self.objects)

    def push(self, data: bytes) -> None:
        """Read on."""
        for byte in data:
            if self.text is not None:
                self._in_string(self.text, byte)
            else:
                self._between(byte)

    def would_repeat(self, data: bytes) -> bool:
        """Return whether reading `data` next would repeat a key."""
        ahead = self.copy()
        ahead.push(data)
        return ahead.repeats

    def copy(self) -> KeyScanner:
        """Return a scanner at the same place that has seen no repeated key."""
        return KeyScanner(
            [None if keys is None else set(keys) for keys in self.objects],
            None if self.text is None else bytearray(self.text),
            self.is_key, False, self._expects_key, self._is_escaped,
        )  # fmt: skip

    def ends_known(self, rest: bytes) -> bool:
        """Return whether the open key, ended by `rest` and a quote, is in its object already. `rest` has no quote."""
        if self.text is None or not self.is_key or not self.objects:
            return False
        if self._is_escaped:
            return self.would_repeat(rest + b'"')
        return _decoded(bytes(self.text) + rest) in (self.objects[-1] or ())

    def _in_string(self, text: bytearray, byte: int) -> None:
        if byte != _QUOTE or self._is_escaped:
            text.append(byte)
            self._is_escaped = byte == _BACKSLASH and not self._is_escaped
            return
        keys = self.objects[-1] if self.objects else None
        if self.is_key and keys is not None:
            key = _decoded(bytes(text))
            self.repeats = self.repeats or key in keys
            keys.add(key)
        self.text, self.is_key, self._expects_key = None, False, False

    def _between(self, byte: int) -> None:
        if byte == _QUOTE:
            self.text, self.is_key, self._is_escaped = bytearray(), self._expects_key, False
        elif byte in b"{[":
            self.objects.append(set() if byte == ord("{") else None)
            self._expects_key = byte == ord("{")
        elif byte in b"}]" and self.objects:
            self.objects.pop()
            self._expects_key = False
        elif byte == ord(","):
            self._expects_key = bool(self.objects) and self.objects[-1] is not None


def _decoded(text: bytes) -> str:
    """A string without its escapes; as it is written where it is malformed."""
    written = text.decode("utf-8", "surrogateescape")
    if _BACKSLASH not in text:
        return written
    try:
        return str(json.loads(f'"{written}"', strict=False))
    except ValueError:
        return written
