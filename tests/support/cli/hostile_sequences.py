"""Texts that would act on a terminal if they reached it as they are, and how to see that one did.

Every one carries a mark: a parameter (7777) or a word (ZQ) that no front end writes by itself. What no mark can tell, a
stray control character, counts wherever it stands.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from tests.support.cli.terminal_stream import REORDERING, Token

ACTING = {
    "title": "\x1b]0;ZQtitle\x07",
    "title, ended by ST": "\x1b]2;ZQtitle\x1b\\",
    "link": "\x1b]8;;http://ZQ/\x1b\\ZQlink\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;WlE=\x07",
    "palette": "\x1b]4;7777;rgb:00/00/00\x07",
    "notification": "\x1b]777;notify;ZQ;ZQ\x07",
    "request of a setting": "\x1bP$qZQ\x1b\\",
    "sixel": "\x1bP7777q#0;2;0;0;0#0!7777~-\x1b\\",
    "unfinished DCS": "\x1bPZQ",
    "application command": "\x1b_GZQ,7777\x1b\\",
    "privacy message": "\x1b^ZQ\x1b\\",
    "start of string": "\x1bXZQ\x1b\\",
    "colour": "\x1b[38;5;7777mZQ",
    "place": "\x1b[7777;7777HZQ",
    "clear": "\x1b[7777J",
    "mode": "\x1b[?7777h",
    "alternate screen": "\x1b[?7777;1049h",
    "scrolling": "\x1b[7777;1r",
    "report": "\x1b[7777n",
    "window": "\x1b[7777t",
    "kitty keyboard": "\x1b[>7777u",
    "rectangle": "\x1b[7777;1$z",
    "reset": "\x1bcZQ",
    "charset": "\x1b(0ZQ",
    "keypad": "\x1b=ZQ",
    "C1 CSI": "\x9b7777mZQ",
    "C1 OSC": "\x9d0;ZQ\x9c",
    "C1 DCS": "\x90ZQ\x9c",
    "C1 APC": "\x9fZQ\x9c",
    "C1 NEL": "ZQ\x85ZQ",
    "lone CR": "ZQbefore\rZQafter",
    "backspaces": "ZQ\b\b\bZQ",
    "bell": "ZQ\x07",
    "vertical": "ZQ\x0b\x0cZQ",
    "shift": "\x0eZQ\x0f",
    "NUL and DEL": "Z\x00Q\x7f",
    "unfinished CSI": "ZQ\x1b[",
    "lone ESC": "ZQ\x1b",
    "tag in an ESC": "\x1b[\x1b[7777mZQ",
    "override": "\u202eZQ\u202c",
    "isolate": "\u2066ZQ\u2069",
    "embedding": "\u202bZQ",
    "separators": "ZQ\u2028\u2029ZQ",
    "split by others": "\x1b\u200b[7777m\x1b\ufe0f]0;ZQ\x07",
    "enquiry": "\x05ZQ",
    "substitute": "\x1b[7\x1a777mZQ\x18",
}
_MARKED = re.compile("7777|ZQ")
# What the renderers write by themselves: colours, the cursor, parts of the screen, modes, questions.
_OWN = re.compile(
    "\x1b\\[(?:[0-9;:]*m|[0-9;]*[ABCDGHJKdfLMPX@STr]|\\?[0-9;]+[hl]|6n|c|\\?[0-9]+\\$p|[<>=][0-9;]*u|\\?u|[0-6] q"
    "|>q)\\Z"
)
# What was copied, in base64, and the shape of the mouse's pointer.
_OWN_OSC = re.compile("\x1b\\](?:52;c;[A-Za-z0-9+/]*=*|22;[a-z-]*)\x07\\Z")
_INTRODUCERS = ("\x1b[", "\x1b]", "\x1bP", "\x1b_", "\x1b\\", "7777", "ZQ", "m", "H", "J", "h")
_WORDS = "é 語 ع א 🦙 e\u0301 \U000e0041 \ufffe ``` ** [x]( <b> &#27; &#x9b; \\x1b \\u001b %1B [red] [/]"
_PIECES = (
    *"abcXYZ 019;[]()?<>$\"'\\#@{}*_`~|-+=.:\u200d\ufe0f",
    *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029",
    *map(chr, range(32)),
    *map(chr, range(0x7F, 0xA1)),
    *_INTRODUCERS,
    *_WORDS.split(),
    "[@click=app.quit]x[/]",
    "\n\n",
)


def random_text(rng: random.Random, longest: int = 24) -> str:
    """Any of the pieces that act, and letters."""
    return "".join(rng.choices(_PIECES, k=rng.randint(1, longest)))


@dataclass
class Watch:
    """Sees every token that a program writes; `wrong` are those that no renderer wrote."""

    seen: int = 0
    wrong: list[str] = field(default_factory=list)
    _carriage: bool = False

    def __call__(self, token: Token) -> None:
        self.seen += 1
        if not self._is_own(token):
            self.wrong.append(f"{token.kind}: {token.text[:200]!r}")
        self._carriage = token.text == "\r"

    def _is_own(self, token: Token) -> bool:
        if token.kind == "text":
            lone_cr = self._carriage and token.text.startswith("ZQafter")
            return not REORDERING.search(token.text) and not lone_cr
        if token.kind == "control":
            return token.text in "\r\n\t\b"
        if token.kind == "csi":
            return bool(_OWN.match(token.text)) and not _MARKED.search(token.text)
        if token.kind == "osc":
            return bool(_OWN_OSC.match(token.text)) and token.text != ACTING["clipboard"]
        return False
