"""The escape sequence (OSC 52) that puts a text on the clipboard of the terminal that the user sits at, over SSH too.

The text travels as base64, so nothing in it acts on the terminal. A terminal does not answer whether it took it.
"""

from __future__ import annotations

import base64

MOST_BYTES = 74_994  # 100,000 characters of base64 with the sequence around them: what terminals accept
TOO_LONG = "too long for the terminal's clipboard"


def copy_sequence(text: str) -> str | None:
    """The escape sequence that copies `text`; None where it is too long for terminals."""
    raw = text.encode("utf-8", "replace")
    return None if len(raw) > MOST_BYTES else f"\x1b]52;c;{base64.b64encode(raw).decode()}\x07"


def copied_notice(text: str) -> str:
    """What to tell of it."""
    return f"copied {len(text)} characters, if the terminal allows it (tmux: `set -s set-clipboard on`)"
