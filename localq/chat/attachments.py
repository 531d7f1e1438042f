"""Text files in a prompt: `@FILE` as system prompt; `/read`, `@file`, `/glob` for messages."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localq.disk import read_text
from localq.errors import LocalqError, usage_error
from localq.sanitize import sanitize
from localq.wording import human_bytes

LOOKED_AT = 100_000  # names that one pattern may visit
MOST_BYTES = 8 * 2**20  # of all files that a message mentions: no context holds more
MENTIONS = 100  # words with @ that are looked up for a note

_NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_ESCAPED = re.compile(r"(?<!\S)\\@")


def system_text(value: str | None) -> str | None:
    """The system prompt of `--system`: text, or the content of @FILE. Raises as `disk.read_text`."""
    if value is None or not value.startswith("@"):
        return value
    return read_text(Path(value[1:])).rstrip("\n")


@dataclass(frozen=True)
class AttachedFile:
    """A text file in a user message: its name, bytes, and tokens by the tokenizer of the model it was sent to.

    length   characters that it takes at the beginning of the content, its heading included
    """

    name: str
    length: int
    bytes: int
    tokens: int

    def is_valid(self) -> bool:
        """Return whether the values, which may come from a file, have the right types and are not negative."""
        sizes = (self.length, self.bytes, self.tokens)
        return isinstance(self.name, str) and all(type(each) is int and each >= 0 for each in sizes)

    @property
    def summary(self) -> str:
        """One line: "notes.txt · 1.2 kB · 340 tokens"."""
        return f"{self.name} · {human_bytes(self.bytes)} · {self.tokens:,} token{'' if self.tokens == 1 else 's'}"


@dataclass(frozen=True)
class Attachment:
    """A text to put before a message, and its name. is_file: the text has a heading with the name."""

    name: str
    body: str
    is_file: bool = True

    @property
    def text(self) -> str:
        """The text as it is put before the message."""
        return f"{self.name}:\n\n{self.body}" if self.is_file else self.body

    def measure(self, count: Callable[[str], int]) -> tuple[AttachedFile, str]:
        """Its size and its text. count: tokens of a text."""
        size = len(self.body.encode("utf-8", "replace"))
        return AttachedFile(self.name, len(self.text), size, count(self.text)), self.text


def read_attachment(path: Path, name: str | None = None) -> Attachment:
    """`path`, called `name` or as its last part is. Raises as `disk.read_text`."""
    return Attachment(sanitize(name or path.name), sanitize(read_text(path)))


class _AttachmentReader:
    """Reads the files of one message. room: bytes left of MOST_BYTES, negative once they were exceeded."""

    def __init__(self) -> None:
        self.room = MOST_BYTES

    def read(self, path: Path) -> Attachment:
        """As `read_attachment`. Raises LocalqError (exit 2) for the file that exceeds MOST_BYTES."""
        found = read_attachment(path)
        self.room -= len(found.body.encode("utf-8", "replace"))
        if self.room < 0:
            raise usage_error(
                str(path),
                f"the attached files are too large (limit: {human_bytes(MOST_BYTES)} in total)",
                "Attach fewer files.",
            )
        return found


def read_attachments(paths: Iterable[Path]) -> tuple[Attachment, ...]:
    """Files for one message, of at most MOST_BYTES in all. Raises LocalqError (exit 2)."""
    reader = _AttachmentReader()
    return tuple(reader.read(path) for path in paths)


def piped_attachment(text: str) -> tuple[Attachment, ...]:
    """Text from stdin, which stands before the prompt; none where it is empty."""
    return (Attachment("stdin", text, is_file=False),) if text else ()


@dataclass(frozen=True)
class ExpandedMessage:
    """The words of a message, the files that it mentions as @file, and those that could not be read."""

    words: str
    attachments: tuple[Attachment, ...] = ()
    failures: tuple[LocalqError, ...] = ()


def expand_mentions(text: str) -> ExpandedMessage:
    r"""Attach the text files that a message mentions as `@path` (`@"a b.txt"` with spaces), as /read does.

    The words stay in the message. A word that names no file, such as a mail address, is plain text; `\@` is an @.
    """
    attached: dict[str, Attachment] = {}
    failures, reader = [], _AttachmentReader()
    for found in _NAMED.finditer(text):
        name = _existing(found[1] or found[2])
        if name is None or name in attached or reader.room < 0:
            continue
        try:
            attached[name] = reader.read(Path(name))
        except LocalqError as error:
            failures.append(LocalqError(f"@{sanitize(name)}", error.why, error.next_step, error.exit_code))
    return ExpandedMessage(_ESCAPED.sub("@", text), tuple(attached.values()), tuple(failures))


def names_files(text: str) -> bool:
    """Return whether one of the first @words of a message names an existing file, as `expand_mentions` finds them."""
    first = itertools.islice(_NAMED.finditer(text), MENTIONS)
    return any(_existing(found[1] or found[2]) is not None for found in first)


def _existing(name: str) -> str | None:
    """`name`, or `name` without punctuation at its end, if that is a file."""
    for each in dict.fromkeys((name, name.rstrip(".,;:!?)]}'\""))):
        try:
            if each and Path(each).expanduser().is_file():
                return each
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
            continue
    return None


def matching_files(pattern: str) -> Iterator[Path]:
    """Files that match `pattern` as in a shell with globstar.

    ** matches all folders below except hidden ones and links; ~ is the home folder. Raises LocalqError (exit 2) after
    LOOKED_AT names, matching or not, and ValueError for a NUL.
    """
    given = os.path.expanduser(pattern)
    parts = [part for part in given.split("/") if part] or ["*"]
    yield from _Walk().files("/" if given.startswith("/") else "", parts)


class _Walk:
    """The walk of one pattern. `looked_at`: names visited so far."""

    def __init__(self) -> None:
        self.looked_at = 0

    def files(self, folder: str, parts: list[str]) -> Iterator[Path]:
        """Files below `folder` ("" = here) that match `parts`, one part for each level."""
        first, rest = parts[0], parts[1:]
        if first == "**":
            yield from self.files(folder, rest or ["*"])
            for entry in self._entries(folder):
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    yield from self.files(folder + entry.name + "/", parts)
            return
        if not any(sign in first for sign in "*?["):
            names = [first]
        else:
            found = (entry.name for entry in self._entries(folder))
            names = [name for name in found if first.startswith(".") or not name.startswith(".")]
            names = [name for name in names if fnmatch.fnmatchcase(name, first)]
        for name in names:
            if rest and os.path.isdir(folder + name):
                yield from self.files(folder + name + "/", rest)
            elif not rest and os.path.isfile(folder + name):
                yield Path(folder + name)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        """Entries of a folder; none where it cannot be read."""
        found = []
        try:
            with os.scandir(folder or ".") as entries:
                for entry in entries:
                    self.looked_at += 1
                    if self.looked_at > LOOKED_AT:
                        why = f"this pattern would require scanning more than {LOOKED_AT:,} files"
                        raise usage_error("/glob", why, "Use a narrower pattern.")
                    found.append(entry)
        except OSError:
            return []
        return found
