"""JSON text of calls: members of an object with the text of each value as it is written, and arguments made safe.

Numbers keep their digits: `1.0`, `1e400` and integers of any length reach the tool as the model wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from localq.text.tools.reader import NotACall

_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and Infinity are not JSON


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)  # models write line ends into strings
_STRICT = json.JSONDecoder(parse_constant=_refuse)


def load(text: str) -> Any:
    """The value of a JSON text. Raises NotACall where it is none, or nested too deeply."""
    try:
        value, end = _DECODER.raw_decode(text, _space(text, 0))
    except (ValueError, RecursionError):
        raise NotACall from None
    if _space(text, end) < len(text):
        raise NotACall
    return value


def dump(value: Any) -> str:
    """JSON text of a value, in which characters of all scripts stand as they are."""
    return json.dumps(_without_surrogates(value), ensure_ascii=False)


def members(text: str) -> dict[str, tuple[Any, str]]:
    """key -> (value, its text) of a JSON object. Raises NotACall where `text` is none."""
    found: dict[str, tuple[Any, str]] = {}
    try:
        at = _after(text, 0, "{")
        while text[at : at + 1] != "}":
            key, at = _DECODER.raw_decode(text, at)
            if not isinstance(key, str):
                raise NotACall
            at = _after(text, at, ":")
            value, end = _DECODER.raw_decode(text, at)
            found[key] = value, text[at:end]
            at = _space(text, end)
            if text[at : at + 1] == ",":
                at = _after(text, at, ",")
            elif text[at : at + 1] != "}":
                raise NotACall
    except (ValueError, RecursionError):
        raise NotACall from None
    if _space(text, at + 1) < len(text):
        raise NotACall
    return found


def items(text: str) -> list[tuple[Any, str]]:
    """(value, its text) of each item of a JSON list. Raises NotACall where `text` is none."""
    found: list[tuple[Any, str]] = []
    try:
        at = _after(text, 0, "[")
        while text[at : at + 1] != "]":
            value, end = _DECODER.raw_decode(text, at)
            found.append((value, text[at:end]))
            at = _space(text, end)
            if text[at : at + 1] == ",":
                at = _after(text, at, ",")
            elif text[at : at + 1] != "]":
                raise NotACall
    except (ValueError, RecursionError):
        raise NotACall from None
    if _space(text, at + 1) < len(text):
        raise NotACall
    return found


def object_text(parts: Iterable[tuple[str, str]]) -> str:
    """JSON text of an object from keys and the texts of their values; the last value of a key counts."""
    return "{" + ", ".join(f"{dump(key)}: {value}" for key, value in dict(parts).items()) + "}"


def arguments_text(value: Any, text: str) -> str:
    """JSON text of the arguments that a model wrote as `text`, whose value is `value`; {} for none.

    An object that is written as a string is taken out of it. Raises NotACall for another value.
    """
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        text, value = value.strip(), load(value)
    if not isinstance(value, dict):
        raise NotACall
    return text if _is_plain(text) else dump(value)


def scalar_text(text: str) -> str | None:
    """`text` where it is valid JSON of any kind but a string; None elsewhere."""
    stripped = text.strip()
    try:
        value = load(stripped)
    except NotACall:
        return None
    if isinstance(value, str):
        return None
    return stripped if _is_plain(stripped) else dump(value)


def _is_plain(text: str) -> bool:
    """Return whether `text` is JSON that every reader accepts: no newlines in strings, no lone surrogates."""
    if _SURROGATE.search(text):
        return False
    try:
        _STRICT.raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    return [_without_surrogates(each) for each in value] if isinstance(value, list) else value


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _after(text: str, at: int, mark: str) -> int:
    """The place behind `mark` and white space."""
    at = _space(text, at)
    if text[at : at + 1] != mark:
        raise NotACall
    return _space(text, at + 1)
