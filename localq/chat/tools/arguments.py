"""Validation of a tool call's arguments against the schema, before the user is asked about it.

The JSON schema is untrusted, so only checks in linear time are made: types, required and unknown names, and
enumerations, in objects and lists. Patterns, references and combinations are left to the server, which checks again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MOST_DEPTH = 16
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int, float), "number": (int, float),
}  # fmt: skip


def mismatch(arguments: str, schema: Mapping[str, Any]) -> str:
    """Return why the JSON text `arguments` does not match `schema`; empty if it does, or this module cannot tell."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return "the arguments are not valid JSON"
    if not isinstance(value, dict):
        return "the arguments are not a JSON object"
    return _mismatch(value, schema, "", MOST_DEPTH)


def _mismatch(value: Any, schema: Any, where: str, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth == 0:
        return ""
    at = where or "the arguments"
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if names and not any(_is(value, each) for each in names):
        return f"{at}: expected {' or '.join(map(str, names))}, got {_kind(value)}"
    allowed = schema.get("enum")
    if isinstance(allowed, list) and value not in allowed:
        return f"{at}: expected one of {json.dumps(allowed, ensure_ascii=False)[:200]}"
    if isinstance(value, dict):
        return _object(value, schema, where, depth)
    if isinstance(value, list):
        found = (_mismatch(each, schema.get("items"), f"{at}[{n}]", depth - 1) for n, each in enumerate(value))
        return next((each for each in found if each), "")
    return ""


def _object(value: dict[str, Any], schema: Mapping[str, Any], where: str, depth: int) -> str:
    known, required = schema.get("properties"), schema.get("required")
    known = known if isinstance(known, Mapping) else {}
    for name in required if isinstance(required, list) else []:
        if name not in value:
            return f"{_join(where, str(name))} is missing"
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        for name in value:
            if name not in known:
                return f"unknown property {_join(where, name)}; allowed: {', '.join(map(str, known))[:200]}"
    for name in value.keys() & known.keys():
        if why := _mismatch(value[name], known[name], _join(where, name), depth - 1):
            return why
    return ""


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _is(value: Any, kind: Any) -> bool:
    if not isinstance(kind, str) or kind not in _TYPES:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _kind(value: Any) -> str:
    return next(name for name, types in _TYPES.items() if isinstance(value, types) and _is(value, name))
