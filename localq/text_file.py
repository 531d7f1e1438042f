"""A text that a user named by its file, whatever that turns out to be: read without waiting, up to a limit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from localq.errors import usage_error

MOST_BYTES = 2**20  # of a file that goes before a message; a conversation may have little more


def text_of(path: Path) -> str:
    """The text of a UTF-8 file of at most MOST_BYTES. Raises LocalqError (exit 2) for anything else.

    The file is a regular one, or a pipe that the shell has opened for this process: FILE may be <(COMMAND).
    """
    given = path.parent == Path("/dev/fd")
    try:
        # O_NONBLOCK: opening a named pipe must not wait for somebody who writes to it.
        descriptor = os.open(path.expanduser(), os.O_RDONLY | (0 if given else os.O_NONBLOCK))
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or (given and stat.S_ISFIFO(mode))):
                raise usage_error(str(path), "it is no regular file", "Give a text file.")
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        why = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise usage_error(str(path), why, "Check the path.") from error
    if len(raw) > MOST_BYTES:
        raise usage_error(str(path), f"it has more than {MOST_BYTES / 1e6:.1f} MB", "Give a part of it.")
    if b"\0" in raw:
        raise usage_error(str(path), "it is no text", "Give a text file.")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise usage_error(str(path), f"it is not UTF-8 (byte {error.start})", "Convert it: iconv -t utf-8.") from error
