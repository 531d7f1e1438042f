"""Long tables at a terminal go through the user's pager, as git's do; anywhere else they are printed."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator

from localq.cli.output import has_screen, note

OPTIONS = "FRX"  # of less, unless LESS says otherwise: end where all fits, keep colours, leave the text on the screen


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """What is printed to stdout in here is shown by $PAGER, or `less`, where it is longer than the screen.

    Only at a terminal that can show it, and never where PAGER is empty or `cat`.
    """
    command = os.environ.get("PAGER", "less").strip()
    if command in ("", "cat") or not has_screen():
        yield
        return
    kept = io.StringIO()
    try:
        with contextlib.redirect_stdout(kept):
            yield
    finally:  # what was printed before an error is shown too
        text = kept.getvalue()
        if not _is_long(text) or not _shown(command, text):
            sys.stdout.write(text)
            sys.stdout.flush()


def _is_long(text: str) -> bool:
    """It takes as many lines as the screen has, or more: the prompt comes below it."""
    size = shutil.get_terminal_size()
    return sum(max(1, -(-len(line) // size.columns)) for line in text.splitlines()) >= size.lines


def _shown(command: str, text: str) -> bool:
    """The pager has shown it; False where there is none."""
    import subprocess  # start-up cost: most tables are short, or go into a pipe

    # Ctrl-C is the pager's, which holds the terminal. A handler, because a process inherits what is ignored.
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        pager = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, env={"LESS": OPTIONS, **os.environ}, encoding="utf-8",
            errors="replace",
        )  # fmt: skip
        try:
            pager.communicate(text)  # one that was left before the end is no error
        finally:
            pager.terminate()  # a signal that ends localq ends it too; one that has ended is left alone
    except (OSError, ValueError) as error:  # not found; quotes that do not close
        if "PAGER" in os.environ:
            note(f"PAGER: {command} cannot be run ({error})")
        return False
    finally:
        signal.signal(signal.SIGINT, previous)
    return True
