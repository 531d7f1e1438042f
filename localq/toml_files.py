"""TOML files of users and projects: read to a limit, and looked at before they are parsed.

The standard parser takes time and memory by the square of the parts of a key, calls itself for every bracket, and
makes numbers that Python then refuses to print. So text, comments and strings aside, is counted first; what exceeds a
limit is no settings file or catalogue. Everything wrong with a text is a `LocalqError` of one line with exit code 8.
"""

from __future__ import annotations

import errno
import re
import tomllib
from pathlib import Path
from typing import Any

from localq import disk
from localq.errors import LocalqError, bad_file

MOST_BYTES = 2**20  # of a file
MOST_PARTS = 8  # of a key: a.b.c has three
MOST_DIGITS = 512  # of a number, in any base
MOST_DEPTH = 16  # of brackets in brackets
MOST_CHARACTERS = {"=": 2**16, "[": 2**14, "{": 2**13, ",": 2**15}  # outside comments and strings
_BOM = "\ufeff"  # begins files that some editors write
_FIX = "Fix the file, or move it out of the way."
# One that does not end goes on to the end of its line or of the file, where the parser stops too.
_STRING_OR_COMMENT = re.compile(
    r"""
    \#[^\n]*+
    | \"{3} (?: [^"\\]++ | \\(?s:.) | "(?!"") )*+ \"*+
    | '{3} (?: [^']++ | '(?!'') )*+ '*+
    | " (?: [^"\\\n]++ | \\[^\n] )*+ "?+
    | ' [^'\n]*+ '?+
    """,
    re.VERBOSE,
)
# A string is one quote by now.
_LONG_KEY = re.compile(rf"(?<![\w\"-])(?:[\w\"-]++[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}")
_LONG_NUMBER = re.compile(rf"(?<![\w.+-])[+-]?\d[\w.+:-]{{{MOST_DIGITS}}}")
_NO_BRACKET = re.compile(r"[^\[\]{}]++")
_EMPTY = re.compile(r"\[\]|\{\}")


def read(path: Path) -> str | None:
    """The text of a regular file, or of /dev/null; None where there is no file.

    Raises LocalqError: exit 9 for a file that the system does not let this user read; 8 for anything else: a folder, a
    pipe, a device, more than MOST_BYTES, not UTF-8.
    """
    try:
        raw = disk.read_regular(path, MOST_BYTES + 1, or_null=True)
    except FileNotFoundError:
        return None
    except disk.NotRegularError as error:
        raise bad_file(
            str(path), "not a regular file", "Replace it with a text file, or move it out of the way."
        ) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):  # no file, whoever reads it
            raise _unreadable(str(path), error.strerror or str(error)) from error
        raise disk.read_error(path, error) from error
    _check_size(len(raw), str(path))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(str(path), f"not UTF-8 text ({error.reason} at byte {error.start})") from error


def parse(text: str, where: str) -> dict[str, Any]:
    """The table of the TOML `text` of the file `where`; a byte order mark is skipped. Raises LocalqError (exit 8)."""
    _check_size(len(text), where)
    text = text.removeprefix(_BOM)
    _check(text, where)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError
        raise _unreadable(where, str(error)) from error


def _check(text: str, where: str) -> None:
    """Raise for a text that could take much time or memory to parse, or make a number that cannot be printed."""
    bare = _STRING_OR_COMMENT.sub('"', text)
    if any(bare.count(character) > most for character, most in MOST_CHARACTERS.items()):
        raise bad_file(where, "too many keys, tables or lists for a settings file", _FIX)
    for pattern, why in (
        (_LONG_KEY, f"a key has more than {MOST_PARTS} parts"),
        (_LONG_NUMBER, f"a number has more than {MOST_DIGITS} digits"),
    ):
        if pattern.search(bare):
            raise bad_file(where, f"{why} ({_place(text, pattern)})", _FIX)
    if is_deep(bare, MOST_DEPTH):
        raise bad_file(where, f"nested more than {MOST_DEPTH} levels deep", _FIX)


def _place(text: str, pattern: re.Pattern[str]) -> str:
    """The line of what `pattern` finds."""
    kept = _STRING_OR_COMMENT.sub(lambda found: '"' + "\n" * found[0].count("\n"), text)
    found = pattern.search(kept)
    return f"line {kept.count(chr(10), 0, found.start()) + 1}" if found else "over several lines"


def is_deep(bare: str, most: int) -> bool:
    """Return whether brackets in `bare`, a text without strings, are unpaired or nested more than `most` deep."""
    left = _NO_BRACKET.sub("", bare)
    for _ in range(most):
        if not left:
            return False
        left = _EMPTY.sub("", left)
    return bool(left)


def _check_size(size: int, where: str) -> None:
    if size > MOST_BYTES:
        raise bad_file(where, f"too large (limit for TOML files: {MOST_BYTES / 1e6:.1f} MB)", _FIX)


def _unreadable(where: str, why: str) -> LocalqError:
    return bad_file(where, f"cannot be read ({why})", _FIX)
