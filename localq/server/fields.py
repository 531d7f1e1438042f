"""`Fields`: an object of a request, read field by field; an error names the field by its path, `messages[2].role`.

A field that is null counts as absent, as in OpenAI's clients. Fields that an API does not have are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from localq.server.api_error import ApiError, bad_field

_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "true or false", int: "an integer"}


class Fields:
    """The fields of `body`; path: of the object itself, "" for the whole request."""

    def __init__(self, body: dict[str, Any], path: str = "") -> None:
        self._body, self.path = body, path

    def name(self, field: str) -> str:
        """The path of a field."""
        return f"{self.path}.{field}" if self.path else field

    def has(self, field: str) -> bool:
        """Return whether the field is there, and not null."""
        return self._body.get(field) is not None

    def value(self, field: str) -> Any:
        """The value as it is, None where there is none."""
        return self._body.get(field)

    def bad(self, field: str, why: str, allowed: str = "") -> ApiError:
        """The error for this field."""
        return bad_field(self.name(field), why, allowed)

    def require(self, field: str) -> None:
        """Raise the error for a field that is missing."""
        if not self.has(field):
            raise bad_field(self.name(field), "this field is required", code="missing_required_parameter")

    def _of(self, field: str, kind: type) -> Any:
        value = self._body.get(field)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.bad(field, f"must be {_KINDS[kind]}")
        return value

    def text(self, field: str, longest: int | None = None) -> str | None:
        """A string."""
        value: str | None = self._of(field, str)
        if value is not None and longest is not None and len(value) > longest:
            raise self.bad(field, f"longer than {longest} characters")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value: bool | None = self._of(field, bool)
        return default if value is None else value

    def choice(self, field: str, allowed: Collection[str]) -> str | None:
        """One of these words."""
        value: str | None = self._of(field, str)
        if value is not None and value not in allowed:
            raise self.bad(field, f"{_shown(value)} is not a valid value", f"Allowed: {', '.join(allowed)}.")
        return value

    def number(self, field: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`."""
        value = self._body.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(field, "must be a number")
        if not low <= value <= high:
            raise self.bad(field, f"{value:.6g} is out of range" if abs(value) < 1e300 else "out of range",
                           f"Allowed: {low:g} to {high:g}.")  # fmt: skip
        return float(value)

    def integer(self, field: str, low: int, high: int) -> int | None:
        """An integer from `low` to `high`; 3.0 is one."""
        value = self._body.get(field)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(field, "must be an integer")
        if not low <= value <= high:
            shown = str(value) if abs(value) < 2**64 else "the value"
            raise self.bad(field, f"{shown} is out of range", f"Allowed: {low} to {high}.")
        return value

    def object(self, field: str) -> Fields | None:
        """An object."""
        value: dict[str, Any] | None = self._of(field, dict)
        return None if value is None else Fields(value, self.name(field))

    def array(self, field: str, most: int) -> list[Any]:
        """An array with at most `most` items; [] where there is none."""
        value: list[Any] | None = self._of(field, list)
        if value is not None and len(value) > most:
            raise self.bad(field, f"too many items ({len(value)})", f"Use at most {most}.")
        return value or []

    def objects(self, field: str, most: int) -> Sequence[Fields]:
        """An array of objects."""
        found = []
        for place, each in enumerate(self.array(field, most)):
            path = f"{self.name(field)}[{place}]"
            if not isinstance(each, dict):
                raise bad_field(path, "must be an object")
            found.append(Fields(each, path))
        return found

    def texts(self, field: str, most: int) -> list[str]:
        """A string, or an array of strings."""
        value = self._body.get(field)
        if isinstance(value, str):
            return [value]
        if value is not None and not isinstance(value, list):
            raise self.bad(field, "must be a string or an array of strings")
        found = self.array(field, most)
        if not all(isinstance(each, str) for each in found):
            raise self.bad(field, "must be a string or an array of strings")
        return found

    def refuse(self, field: str, why: str, idle: Sequence[Any] = (None,)) -> None:
        """Raise an error for a field that this server does not support, unless it has one of the values `idle`."""
        value = self._body.get(field)
        if not any(value == each and type(value) is type(each) for each in (None, *idle)):
            raise self.bad(field, why)


def _shown(value: str) -> str:
    return f"'{''.join(letter if letter.isprintable() else '?' for letter in value[:40])}'"
