"""Sanitized text: the filter for all text that reaches a terminal, the streams behind it, and secrets as `***`.

Escape sequences can write the clipboard (OSC 52), hide a link's target (OSC 8) or redraw the screen (DCS, CSI), and
bidi overrides change how text reads. A chat needs none of them. The command line writes to `CleanStream`s only, so what
a library prints is clean as well; what draws with escape sequences takes the stream behind it, `unfiltered`.

Errors, logs, `repr` and tracebacks show what a variable holds, and users paste them into reports. `Secret` and
`Address` hold a secret from where it is read to the call that needs it (`reveal`); `redact` takes secrets out of text
of other origin, such as messages of libraries.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TextIO, cast
from urllib.parse import unquote

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


def is_encoded_as(stream: TextIO, encoding: str) -> bool:
    """Return whether `stream` has this encoding, as `codecs` spells it; one without an encoding counts as UTF-8."""
    try:
        return codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name == encoding
    except LookupError:
        return False


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


def write_json(out: TextIO, body: Mapping[str, Any]) -> None:
    """Write `body` to `out` as one line, as `json_text` has it; where `out` is not UTF-8, all non-ASCII is escaped."""
    print_lines(out, json_text(body) if is_encoded_as(out, "utf-8") else json.dumps(body))


# ---- secrets

HIDDEN = "***"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_ID_TOKEN", "LOCALQ_TOKEN")
_ADDRESS_VARIABLES = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
_LEAST = 6  # characters of a known secret that is searched for in text: shorter ones are parts of words
_LONGEST = 200  # characters of an address that are shown
_KEYS = "signature|credential|token|key|secret|password|policy|sig"  # in the names of values of a query
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:/+")
_LOOKS_SECRET = (
    (re.compile(r"(?<=://)[^\s/?#\"'<>]*@"), ""),  # a name and a password in an address
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), HIDDEN),
    (re.compile(r"\b(bearer|authorization\W{1,6}basic) +[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (re.compile(rf"([?&][\w-]*(?:{_KEYS})[\w-]*=)[^&\s\"'<>]+", re.IGNORECASE), rf"\1{HIDDEN}"),  # signed addresses
)
_known: set[str] = set()  # secrets that came from elsewhere than the environment


class Secret:
    """A secret; its text is `***`, and it cannot be pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        """value: the secret, which `redact` removes from texts from now on."""
        self._value = value
        _known.update(self._hidden())

    def _hidden(self) -> set[str]:
        return {self._value} - {""}

    def reveal(self) -> str:
        """The secret itself, for the call that needs it; keep it in no variable."""
        return self._value

    def __str__(self) -> str:
        return HIDDEN

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, specification: str) -> str:
        return format(str(self), specification)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not saved")


class Address(Secret):
    """An address that may hold a name and a password; its text is without them, and without a query."""

    __slots__ = ()

    def __str__(self) -> str:
        shown = _without_password(self._value).partition("?")[0]
        return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."

    def _hidden(self) -> set[str]:
        return _passwords(self._value)


def redact(text: str) -> str:
    """`text` without the secrets of this process and the environment, and without what looks like one."""
    for known in sorted(_known | _of_environment(), key=len, reverse=True):
        if len(known) >= _LEAST:
            text = text.replace(known, HIDDEN)
    for pattern, shown in _LOOKS_SECRET:
        text = pattern.sub(shown, text)
    return text


def _of_environment() -> set[str]:
    found = {os.environ.get(name, "").strip() for name in TOKEN_VARIABLES} - {""}
    for name in _ADDRESS_VARIABLES:
        found.update(*(_passwords(os.environ.get(each, "")) for each in (name, name.lower())))
    return found


def _passwords(address: str) -> set[str]:
    """Return the secrets in an address: its password, else its user name; as it is and decoded."""
    scheme = _SCHEME.match(address)
    before, at, _ = address[scheme.end() if scheme else 0 :].rpartition("@")
    password = before.partition(":")[2] or before
    return {password, unquote(password)} - {""} if at else set()


def _without_password(address: str) -> str:
    """`address` without what stands before the last @, even where the address is not valid."""
    match = _SCHEME.match(address)
    scheme, rest = (match[0], address[match.end() :]) if match else ("", address)
    before, at, after = rest.rpartition("@")
    is_path = ":" not in before and "/" in before  # as in https://host/@name, which has no password
    return address if not at or is_path else scheme + after
