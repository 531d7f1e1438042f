"""Copying to the clipboard of the terminal, or printing where there is no such terminal."""

from __future__ import annotations

import sys

from localq.chat.terminal.clipboard import TOO_LONG, copied, sequence
from localq.cli.output import is_rich_terminal
from localq.sanitize import sanitize


def copy(text: str) -> str:
    """Copy `text`, or print it as it is where there is no such terminal or it is too long. Returns what to tell."""
    text = sanitize(text)  # whatever pastes it may be a terminal
    code = sequence(text)
    if code is not None and is_rich_terminal(sys.stdout):
        sys.stdout.write(code)
        sys.stdout.flush()
        return copied(text)
    print(text, flush=True)
    return f"{'no terminal with a clipboard' if code is not None else TOO_LONG}: printed instead"
