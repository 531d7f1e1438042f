"""What was typed at the prompt of a chat, kept in a file that only the user can read: both front ends share it.

Its format is that of prompt_toolkit's `FileHistory`: before each text an empty line and a comment with the time, then
its lines, each behind a "+".
"""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path

from localq import places
from localq.sanitize import sanitize

MOST = 10_000  # texts that are read back


def is_enabled() -> bool:
    """False where LOCALQ_NOHISTORY asks for none."""
    return not os.environ.get("LOCALQ_NOHISTORY")


def open_file() -> Path:
    """The file, made if it was not there. Raises OSError where that cannot be."""
    path = places.state_dir() / "history"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.closing(os.fdopen(descriptor)):
        os.fchmod(descriptor, 0o600)
    return path


def append(path: Path, text: str) -> None:
    """Put `text` at the end of the file, without characters that act on a terminal. Raises OSError."""
    lines = "".join(f"+{line}\n" for line in sanitize(text).split("\n"))
    with open(path, "ab") as file:
        file.write(f"\n# {datetime.datetime.now()}\n{lines}".encode("utf-8", "replace"))


def read(path: Path) -> list[str]:
    """The texts in the file, the oldest first, at most the newest MOST; bytes that are no text are replaced."""
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
    """Going back and forth in what was typed. path None = it is forgotten with the process."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.entries: list[str] = []
        with contextlib.suppress(OSError):
            self.entries = read(path) if path is not None else []
        self._place = len(self.entries)
        self._draft = ""

    def add(self, text: str) -> None:
        """The newest; the same twice is one."""
        if text.strip() and self.entries[-1:] != [text]:
            self.entries.append(text)
            with contextlib.suppress(OSError):  # a full disk takes no line more, and none of the chat
                if self.path is not None:
                    append(self.path, text)
        self._place = len(self.entries)

    def older(self, draft: str) -> str | None:
        """The text before; `draft` is what stands there now. None at the oldest."""
        if self._place == 0:
            return None
        if self._place == len(self.entries):
            self._draft = draft
        self._place -= 1
        return self.entries[self._place]

    def newer(self) -> str | None:
        """The text after; at the end what was being written. None there."""
        if self._place >= len(self.entries):
            return None
        self._place += 1
        return self._draft if self._place == len(self.entries) else self.entries[self._place]
