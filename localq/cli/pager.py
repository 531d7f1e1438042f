"""Long output at a terminal goes through the user's pager, as in git; elsewhere it is printed."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
from collections.abc import Iterator

from localq.cli.output import has_screen, note, stdout
from localq.sanitize import clean_stream, unfiltered

OPTIONS = "FRX"  # of less, unless LESS is set: quit if it fits, keep colours, leave the text on the screen


@contextlib.contextmanager
def page_output() -> Iterator[None]:
    """Show what is printed to stdout inside through $PAGER or `less` if it is longer than the screen.

    Only at a terminal, and never if PAGER is empty or `cat`.
    """
    command = os.environ.get("PAGER", "less").strip()
    if command in ("", "cat") or not has_screen():
        yield
        return
    buffer = io.StringIO()
    try:
        with contextlib.redirect_stdout(clean_stream(buffer)):
            yield
    finally:  # also shows what was printed before an error
        text = buffer.getvalue()
        if not _is_long(text) or not _run_pager(command, text):
            terminal = unfiltered(stdout())  # the text is sanitized already
            terminal.write(text)
            terminal.flush()


def _is_long(text: str) -> bool:
    """Return whether the text, with the prompt below it, exceeds the screen."""
    size = shutil.get_terminal_size()
    return sum(max(1, -(-len(line) // size.columns)) for line in text.splitlines()) >= size.lines


def _run_pager(command: str, text: str) -> bool:
    """Run the pager; return whether it ran."""
    from localq.chat.terminal import child  # start-up cost: most output is short or piped

    # The pager handles Ctrl-C. A handler rather than SIG_IGN, which the pager would inherit.
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        child.run(shlex.split(command), text, LESS=OPTIONS)
    except (OSError, ValueError) as error:  # not found, or unbalanced quotes
        if "PAGER" in os.environ:
            note(f"PAGER: cannot run {command} ({error})")
        return False
    finally:
        signal.signal(signal.SIGINT, previous)
    return True
