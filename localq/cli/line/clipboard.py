"""Copy to the terminal's clipboard, or print where the terminal has none."""

from __future__ import annotations

import sys

from localq.chat.terminal.clipboard import TOO_LONG, copied_notice, copy_sequence
from localq.cli.output import is_rich_terminal
from localq.sanitize import sanitize


def copy(text: str) -> str:
    """Copy `text`, or print it without a clipboard or if it is too long. Returns the message."""
    text = sanitize(text)  # it may be pasted into a terminal
    code = copy_sequence(text)
    if code is not None and is_rich_terminal(sys.stdout):
        sys.stdout.write(code)
        sys.stdout.flush()
        return copied_notice(text)
    print(text, flush=True)
    return f"{'this terminal has no clipboard access' if code is not None else TOO_LONG}; printed instead"
