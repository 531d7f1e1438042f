"""Copying to the clipboard of the terminal that the user sits at, by an escape sequence (OSC 52): over SSH too.

The text travels as base64, so nothing in it acts on the terminal. A terminal does not answer whether it took it.
"""

from __future__ import annotations

import base64
import sys

from localq.cli.output import is_rich_terminal
from localq.sanitize import sanitize

MOST_BYTES = 74_994  # 100,000 characters of base64 with the sequence around them: what terminals accept


def sequence(text: str) -> str | None:
    """The escape sequence that copies `text`; None where it is too long for terminals."""
    raw = text.encode("utf-8", "replace")
    return None if len(raw) > MOST_BYTES else f"\x1b]52;c;{base64.b64encode(raw).decode()}\x07"


def copy(text: str) -> str:
    """Copy `text`, or print it as it is where there is no such terminal or it is too long. Returns what to tell."""
    text = sanitize(text)  # whatever pastes it may be a terminal
    code = sequence(text)
    if code is not None and is_rich_terminal(sys.stdout):
        sys.stdout.write(code)
        sys.stdout.flush()
        return f"copied {len(text)} characters, if the terminal allows it (tmux: `set -s set-clipboard on`)"
    why = "no terminal with a clipboard" if code is not None else "too long for the terminal's clipboard"
    print(text, flush=True)
    return f"{why}: printed instead"
