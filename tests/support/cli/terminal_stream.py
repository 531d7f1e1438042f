"""What a program writes to a terminal, taken apart: text, control characters and escape sequences; and what they leave.

Sequences by ECMA-48 and xterm's list (invisible-island.net/xterm/ctlseqs). Nothing here trusts the program: a sequence
that never ends is a token of its own, and bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# ESC [ ... final | ESC ] P X ^ _ string, ended by BEL or ST | ESC intermediates final | one control character
_TOKEN = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"
    "|\x1b[\\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)"
    "|\x1b[ -/]*[0-OQ-WYZ\\\\`-~]"
    "|[\x00-\x1f\x7f-\x9f]"
)
_MAYBE_CUT = re.compile("\x1b(?:\\[[0-?]*[ -/]*|[\\]PX^_][^\x07\x1b\x9c]*\x1b?|[ -/]*)?\\Z")
_MODE = re.compile("\x1b\\[\\?([0-9;]+)([hl])\\Z")
_KITTY = re.compile("\x1b\\[([<>])([0-9]*)u\\Z")
LONGEST = 200_000  # characters of a sequence before it counts as one that never ends; OSC 52 holds 100,000

ALTERNATE, CURSOR, PASTE = 1049, 25, 2004
# Modes that must not be left on: the alternate screen, mouse reports of all kinds, focus, paste, resize in band, sync.
GUEST_MODES = frozenset({47, 1047, 1049, 9, 1000, 1001, 1002, 1003, 1005, 1006, 1015, 1016, 1004, 2004, 2026, 2048})
# What reorders or breaks text without being a control character of ISO 6429.
REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069\u2028\u2029]")


@dataclass(frozen=True)
class Token:
    """`kind`: "text", "control" (one character), "csi", "osc", "dcs", "string" (SOS, PM, APC) or "escape"."""

    kind: str
    text: str


_KINDS = {"[": "csi", "]": "osc", "P": "dcs", "X": "string", "^": "string", "_": "string"}


def _kind(token: str) -> str:
    if token[0] != "\x1b" or len(token) == 1:
        return "control"
    return _KINDS.get(token[1], "escape")


class Reader:
    """Bytes in, tokens out; what is cut at the end waits for the rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> Iterator[Token]:
        """The tokens that are whole with `data`."""
        text = self._rest + self._decoder.decode(data)
        cut = _MAYBE_CUT.search(text, max(0, len(text) - LONGEST))
        end = cut.start() if cut else len(text)
        self._rest = text[end:]
        yield from tokens(text[:end])

    def finish(self) -> Iterator[Token]:
        """What was still open."""
        yield from tokens(self._rest + self._decoder.decode(b"", final=True))
        self._rest = ""


def tokens(text: str) -> Iterator[Token]:
    """The tokens of `text`; an ESC that begins nothing known is a control character."""
    start = 0
    for match in _TOKEN.finditer(text):
        if match.start() > start:
            yield Token("text", text[start : match.start()])
        yield Token(_kind(match.group()), match.group())
        start = match.end()
    if start < len(text):
        yield Token("text", text[start:])


@dataclass
class Modes:
    """What the sequences so far have switched on; `hidden` is the cursor's, `keyboard` the depth of kitty's stack."""

    on: set[int] = field(default_factory=set)
    ever: set[int] = field(default_factory=set)
    hidden: bool = False
    wraps: bool = True
    keyboard: int = 0
    cursor_keys: bool = False

    def see(self, token: Token) -> None:
        """Follow one token."""
        if token.kind != "csi":
            return
        if kitty := _KITTY.match(token.text):
            self.keyboard = max(0, self.keyboard + (1 if kitty[1] == ">" else -int(kitty[2] or 1)))
        elif mode := _MODE.match(token.text):
            for number in map(int, filter(None, mode[1].split(";"))):
                self._switch(number, mode[2] == "h")

    def _switch(self, number: int, on: bool) -> None:
        if number == CURSOR:
            self.hidden = not on
        elif number == 7:
            self.wraps = on
        elif number == 1:
            self.cursor_keys = on
        elif on:
            self.on.add(number)
            self.ever.add(number)
        else:
            self.on.discard(number)

    def left(self) -> list[str]:
        """What a program that ends now leaves behind; empty where the terminal is as it was."""
        found = [f"mode {number} is on" for number in sorted(self.on & GUEST_MODES)]
        found += ["the cursor is hidden"] if self.hidden else []
        found += ["lines do not wrap"] if not self.wraps else []
        found += ["kitty's keyboard protocol is on"] if self.keyboard else []
        return found + (["cursor keys are in application mode"] if self.cursor_keys else [])
