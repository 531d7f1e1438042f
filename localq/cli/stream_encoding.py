"""Standard streams without UTF-8: characters that do not fit are replaced, with one warning.

Invalid bytes or a limited terminal never end a command, and an answer that lost characters is marked as such.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from typing import TextIO

from localq.sanitize import is_encoded_as

_ERRORS = "localq.replaced"
_SURROGATE = re.compile("[\ud800-\udfff]")
_warnings: dict[str, str] = {}  # direction -> the warning, "" once it is printed


def prepare(*streams: TextIO | None) -> None:
    """Make these streams replace characters and record warnings. Input in ASCII is read as UTF-8."""
    codecs.register_error(_ERRORS, _replace)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
            if stream is sys.stdin and _is_read_as_utf8(stream):
                stream.reconfigure(encoding="utf-8", errors=_ERRORS)


def _is_read_as_utf8(stdin: TextIO) -> bool:
    """Return whether to read UTF-8 rather than the environment's encoding: no keyboard sends UTF-16."""
    if stdin.isatty():
        return "a".encode(stdin.encoding) != b"a"
    return is_encoded_as(stdin, "ascii")


def take_warnings() -> list[str]:
    """New warnings since the last call: one about output, one about input."""
    lines = [line for line in _warnings.values() if line]
    _warnings.update(dict.fromkeys(_warnings, ""))
    return lines


def is_utf8(stream: TextIO) -> bool:
    """Return whether the stream can take every character."""
    return is_encoded_as(stream, "utf-8")


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        if not _SURROGATE.match(error.object, error.start):  # a lone surrogate fits no encoding
            why = f"characters that this locale cannot encode ({error.encoding}) are shown as '?'"
            _warnings.setdefault("written", f"{why}; set LC_ALL=C.UTF-8 to see them")
    elif isinstance(error, UnicodeDecodeError):
        _warnings.setdefault("read", f"input bytes that are not valid {error.encoding} were replaced with U+FFFD")
    return codecs.replace_errors(error)
