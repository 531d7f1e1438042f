"""History of the prompt, in a private file that both front ends share.

The format is that of prompt_toolkit's `FileHistory`: for each text an empty line, a comment with the time, and its
lines, each after a "+".
"""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path

from localq import disk, places
from localq.sanitize import sanitize

MOST = 10_000  # texts read from the file


def is_enabled() -> bool:
    """False where LOCALQ_NOHISTORY is set."""
    return not os.environ.get("LOCALQ_NOHISTORY")


def open_file() -> Path:
    """Path of the history file, created if missing. Raises OSError."""
    path = places.state_dir() / "history"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = disk.open_to_append(disk.resolve(path))  # the user may have put it elsewhere
    try:
        if os.fstat(descriptor).st_nlink == 1:  # by another name it may be anyone's file
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    return path


def append(path: Path, text: str) -> None:
    """Append `text` to the file, without terminal control characters. Raises OSError."""
    lines = "".join(f"+{line}\n" for line in sanitize(text).split("\n"))
    descriptor = disk.open_to_append(disk.resolve(path))
    try:
        disk.write_all(descriptor, f"\n# {datetime.datetime.now()}\n{lines}".encode("utf-8", "replace"))
    finally:
        os.close(descriptor)


def read(path: Path) -> list[str]:
    """The newest MOST texts of the file, the oldest first; invalid bytes are replaced."""
    found: list[str] = []
    lines: list[str] = []
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if line.startswith("+"):
                lines.append(line[1:].removesuffix("\n"))
            elif lines:
                found.append(sanitize("\n".join(lines)))
                lines = []
    if lines:
        found.append(sanitize("\n".join(lines)))
    return found[-MOST:]


class InputHistory:
    """Moves through earlier texts. path None: kept in memory only."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.entries: list[str] = []
        with contextlib.suppress(OSError):
            self.entries = read(path) if path is not None else []
        self._place = len(self.entries)
        self._draft = ""

    def add(self, text: str) -> None:
        """Add the newest text; one equal to the last is not repeated."""
        if text.strip() and self.entries[-1:] != [text]:
            self.entries.append(text)
            with contextlib.suppress(OSError):  # a full disk loses history, but does not stop the chat
                if self.path is not None:
                    append(self.path, text)
        self._place = len(self.entries)

    def older(self, draft: str) -> str | None:
        """The previous text; None at the oldest. draft: the current text of the prompt."""
        if self._place == 0:
            return None
        if self._place == len(self.entries):
            self._draft = draft
        self._place -= 1
        return self.entries[self._place]

    def newer(self) -> str | None:
        """The next text, at the end the draft; None after that."""
        if self._place >= len(self.entries):
            return None
        self._place += 1
        return self._draft if self._place == len(self.entries) else self.entries[self._place]
