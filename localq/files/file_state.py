"""Detection of a file that changed after its header was read: one state, and one error. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from localq.errors import LocalqError, bad_file

State = tuple[int, int]  # bytes, and time of writing in ns


def state_of(found: os.stat_result) -> State:
    """The state of a file whose stat is known."""
    return found.st_size, found.st_mtime_ns


def changed(path: Path) -> LocalqError:
    """The error (exit 8) for a file that was written, or replaced, since its header was read."""
    step = "Run the command again once no other program is writing to the file."
    return bad_file(str(path), "the file changed while it was being read", step)
