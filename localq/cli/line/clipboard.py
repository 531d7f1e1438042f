"""Copy to the terminal's clipboard, or print where the terminal has none."""

from __future__ import annotations

from localq.chat.terminal.clipboard import TOO_LONG, copied_notice, copy_sequence
from localq.cli.output import is_rich_terminal, print_line, stdout
from localq.sanitize import sanitize, unfiltered


def copy(text: str) -> str:
    """Copy `text`, or print it without a clipboard or if it is too long. Returns the message."""
    text = sanitize(text)  # it may be pasted into a terminal
    code = copy_sequence(text)
    if code is not None and is_rich_terminal(stdout()):
        terminal = unfiltered(stdout())
        terminal.write(code)
        terminal.flush()
        return copied_notice(text)
    print_line(text)
    return f"{'this terminal has no clipboard access' if code is not None else TOO_LONG}; printed the text instead"
