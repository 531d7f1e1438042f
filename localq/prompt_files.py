"""Texts that users keep in files: a system prompt (`@FILE`), and what goes before a message (`/read`, `@file`)."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from localq.errors import LocalqError, usage_error
from localq.sanitize import sanitize
from localq.wording import human_bytes

MOST_BYTES = 2**20  # of a file that goes before a message; a conversation may have little more

_NAMED = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_ESCAPED = re.compile(r"(?<!\S)\\@")


def system_text(value: str | None) -> str | None:
    """The system prompt of `--system`: text, or the content of @FILE."""
    if value is None or not value.startswith("@"):
        return value
    try:
        with open(value[1:], encoding="utf-8") as file:
            return file.read().rstrip("\n")
    except (OSError, ValueError) as error:
        raise usage_error(value[1:], f"the system prompt cannot be read ({error})", "Check the path.") from error


@dataclass(frozen=True)
class Attachment:
    """A file as it goes before a message, and what to tell of it."""

    text: str
    told: str


def attachment(path: Path, name: str | None = None) -> Attachment:
    """`path`, called `name` or as its last part is. Raises as `text_of`."""
    text, called = sanitize(text_of(path)), sanitize(name or path.name)
    return Attachment(f"{called}:\n\n{text}", f"{called}: {human_bytes(len(text.encode()))}")


@dataclass(frozen=True)
class Expanded:
    """A message with the texts of the files that it names with an @ in front, and what to tell of each."""

    text: str
    told: tuple[str, ...] = ()


def expanded(text: str) -> Expanded:
    r"""`@path` words (`@"a b.txt"` with spaces) that name text files here put these before the message, as /read does.

    The words stay. What names no file is text like any other, such as a mail address or @someone; `\@` is an @.
    """
    attached: dict[str, Attachment] = {}
    told = []
    for found in _NAMED.finditer(text):
        name = _existing(found[1] or found[2])
        if name is None or name in attached:
            continue
        try:
            attached[name] = attachment(Path(name))
        except LocalqError as error:
            told.append(f"@{sanitize(name)} stays a word: {error.why}")
            continue
        told.append(f"{attached[name].told} go before the message")
    plain = _ESCAPED.sub("@", text)
    return Expanded("\n\n".join([*(each.text for each in attached.values()), plain]), tuple(told))


def _existing(name: str) -> str | None:
    """`name`, or what of it stands before the mark that ends the sentence, if that is a file."""
    for each in dict.fromkeys((name, name.rstrip(".,;:!?)]}'\""))):
        try:
            if each and Path(each).expanduser().is_file():
                return each
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
            continue
    return None


def text_of(path: Path) -> str:
    """The text of a regular UTF-8 file of at most MOST_BYTES. Raises LocalqError (exit 2) for anything else."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for somebody who writes to it.
        descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise usage_error(str(path), "it is no regular file", "Give a text file.")
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        why = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise usage_error(str(path), why, "Check the path.") from error
    if len(raw) > MOST_BYTES:
        raise usage_error(str(path), f"it has more than {human_bytes(MOST_BYTES)}", "Give a part of it.")
    if b"\0" in raw:
        raise usage_error(str(path), "it is no text", "Give a text file.")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise usage_error(str(path), f"it is not UTF-8 (byte {error.start})", "Convert it: iconv -t utf-8.") from error
