"""The JSON of a request, read strictly: an object without duplicate keys, NaN, lone surrogates, or too deep nesting."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from localq.server.api_error import ApiError

MAX_BYTES = 4 * 2**20  # of a body: five times what a conversation may have (`template.MAX_CONVERSATION_BYTES`)
MAX_DEPTH = 64
MAX_PARTS = 200_000  # values and keys, about: each takes up to 250 bytes once it is read
MAX_DIGITS = 400  # of a number


def parse(raw: bytes) -> dict[str, Any]:
    """The object in `raw`. Raises ApiError (400) for anything else."""
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > MAX_PARTS:
        raise _bad(f"has more than {MAX_PARTS:,} values")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _bad("is not UTF-8") from None
    try:
        body = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise _bad(f"is nested more than {MAX_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise _bad(f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(body, dict):
        raise _bad("is not a JSON object")
    _check(body)
    return body


def _bad(why: str) -> ApiError:
    return ApiError(400, f"The request body {why}.", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ApiError(400, f"{_printable(twice)} appears twice in one object.", _printable(twice))
    return found


def _constant(word: str) -> NoReturn:
    raise _bad(f"contains the number {word}, which is not valid JSON")


def _float(text: str) -> float:
    value = float(text) if len(text) <= MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise _bad("contains a number that is too large")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _bad("contains a number that is too large")
    return int(text)


def _check(body: dict[str, Any]) -> None:
    """Refuse what is too deep, and halves of characters, which no text has. No recursion."""
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _bad(f"is nested more than {MAX_DEPTH} levels deep")
        below: list[Any] = []
        for each in level:
            values = [*each.keys(), *each.values()] if isinstance(each, dict) else each
            for value in values:
                if isinstance(value, str):
                    _check_text(value)
                elif isinstance(value, dict | list):
                    below.append(value)
        level = below


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad("contains a lone surrogate in a string") from None


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text[:80])
