"""Standard streams in another encoding than UTF-8: what they cannot take or give is replaced, and told of once.

Neither bytes that are no text nor a poor terminal end a command; but an answer that lost letters on its way must not
look whole.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from typing import TextIO

_ERRORS = "localq.replaced"
_SURROGATE = re.compile("[\ud800-\udfff]")
_lost: dict[str, str] = {}  # way -> what to tell


def prepare(*streams: TextIO | None) -> None:
    """From now on these streams replace, and `lost` knows of it. ASCII is read as UTF-8, which has it in it."""
    codecs.register_error(_ERRORS, _replaced)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
            if stream is sys.stdin and not stream.isatty() and _is(stream, "ascii"):
                stream.reconfigure(encoding="utf-8", errors=_ERRORS)


def lost() -> list[str]:
    """What is to be told and was not told yet: a line for what was written, one for what was read."""
    lines = [line for line in _lost.values() if line]
    _lost.update(dict.fromkeys(_lost, ""))
    return lines


def is_utf8(stream: TextIO) -> bool:
    """Every character can be written there."""
    return _is(stream, "utf-8")


def _is(stream: TextIO, encoding: str) -> bool:
    try:
        return codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name == encoding
    except LookupError:
        return False


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        if not _SURROGATE.match(error.object, error.start):  # half a character is none in any encoding
            why = f"some characters are not in {error.encoding}, which this locale writes: they became ?"
            _lost.setdefault("written", f"{why}; LC_ALL=C.UTF-8 keeps them")
    elif isinstance(error, UnicodeDecodeError):
        _lost.setdefault("read", f"some bytes that were read are no {error.encoding} text: they became U+FFFD")
    return codecs.replace_errors(error)
