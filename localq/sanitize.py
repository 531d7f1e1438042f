"""The filter for all text from models, files, users and the hub that reaches a terminal, and the streams behind it.

Escape sequences can write the clipboard (OSC 52), hide a link's target (OSC 8) or redraw the screen (DCS, CSI), and
bidi overrides change how text reads. A chat needs none of them. The command line writes to `CleanStream`s only, so what
a library prints is clean as well; what draws with escape sequences takes the stream behind it, `unfiltered`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Mapping
from typing import Any, TextIO, cast

# C0 but \t \n, DEL, C1, bidi embeddings/overrides/isolates, line and paragraph separators, lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


def sanitize(text: str) -> str:
    """`text` without control characters (but tab, newline), C1, bidi overrides, lone surrogates.

    Works piece by piece: sanitize(a) + sanitize(b) == sanitize(a + b).
    """
    return _UNSAFE.sub("", text)


def replace_unsafe(text: str) -> str:
    """`text` with U+FFFD for each character that `sanitize` removes, which keeps positions."""
    return _UNSAFE.sub("\ufffd", text)


def json_text(body: Mapping[str, Any]) -> str:
    """One line of JSON in which `sanitize` finds nothing: unsafe characters are escaped."""
    text = json.dumps(body, ensure_ascii=False)
    return text if sanitize(text) == text else json.dumps(body)


class _Stream(io.TextIOBase):
    """A text stream in front of another one, which it never closes. It has no `buffer`: bytes would pass by."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    @property
    def closed(self) -> bool:
        return self.stream.closed

    def close(self) -> None:
        pass

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


class OptionalStream(_Stream):
    """A stream whose text is left out where it cannot be written: notes never cost the answer."""

    def write(self, text: str) -> int:
        """Write `text`, or leave it out."""
        with contextlib.suppress(OSError, ValueError):  # a full disk, a pipe without reader, a closed stream
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, as far as the stream can be written."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


class CleanStream(_Stream):
    """A stream that sanitizes what is written."""

    def write(self, text: str) -> int:
        """Write `text`, sanitized."""
        self.stream.write(sanitize(text))
        return len(text)


def clean_stream(stream: TextIO, optional: bool = False) -> TextIO:
    """Return `stream` behind the filter; `optional`: what cannot be written is left out."""
    behind = OptionalStream(stream) if optional else stream
    return cast(TextIO, CleanStream(cast(TextIO, behind)))


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream behind the filter, for escape sequences of localq itself; the rest is sanitized before."""
    return stream.stream if isinstance(stream, CleanStream) else stream


def print_lines(out: TextIO, *lines: str) -> None:
    """Write lines to `out`, sanitized, and flush it."""
    out.write("".join(f"{sanitize(line)}\n" for line in lines))
    out.flush()
