"""Secrets: access tokens, keys and passwords in addresses, in types whose text is `***`.

Errors, logs, `repr` and tracebacks show what a variable holds, and users paste them into reports. `Secret` and
`Address` hold a secret from where it is read to the call that needs it (`reveal`); `redact` takes secrets out of text
of other origin, such as messages of libraries.
"""

from __future__ import annotations

import os
import re
from typing import NoReturn
from urllib.parse import unquote

HIDDEN = "***"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "LOCALQ_TOKEN")
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
    """What must not be seen of an address: its password, else its user name; as it is and decoded."""
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
