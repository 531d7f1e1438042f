"""Arguments that are written as text: their type comes from the schema that the tool declares.

string   as it is
other    JSON; also `True`, `None` and Python's quotes, as small models write them
several  the first that fits, a string last
unknown  JSON where it is JSON, else a string

A text that does not fit its type is a string: nothing that the model wrote is lost, and the tool says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localq.text.schema_objects import resolve
from localq.text.tools import json_text, python_values
from localq.text.tools.declaration import Tool
from localq.text.tools.reader import NotACall

_BRANCHES = ("anyOf", "oneOf", "allOf")
_MOST_STEPS = 64  # references and branches that are followed
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def text_value(tool: Tool | None, name: str, text: str) -> str:
    """JSON text of the argument `name`, written as `text`."""
    schema = tool.parameters if tool is not None else {}
    kinds = types(schema, parameter(schema, name))
    if kinds == {"string"}:
        return json_text.dump(text)
    word = _WORDS.get(text.strip().lower())
    if word is not None and (not kinds or ("null" if word == "null" else "boolean") in kinds):
        return word
    found = json_text.scalar_text(text)
    if found is None and kinds & {"object", "array"}:
        found = _python(text)
    if found is None or (kinds and "string" in kinds and not _fits(found, kinds)):
        return json_text.dump(text)
    return found


def parameter(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of a property, {} where nothing is known of it."""
    named = schema.get("properties")
    if isinstance(named, dict) and name in named:
        return named[name]
    return schema.get("additionalProperties", {})


def types(root: Mapping[str, Any], schema: Any) -> set[str]:
    """The types that a schema allows, of those that it says; empty where it says none."""
    found: set[str] = set()
    left, steps = [schema], 0
    while left and steps < _MOST_STEPS:
        node, steps = left.pop(), steps + 1
        if not isinstance(node, dict):
            continue
        kind = node.get("type")
        if isinstance(kind, (str, list)):
            found |= {kind} if isinstance(kind, str) else {each for each in kind if isinstance(each, str)}
            continue
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list):
            found |= {_type(value) for value in values}
            continue
        left += [each for key in _BRANCHES for each in _list(node.get(key))]
        left += [target] if (target := resolve(dict(root), node.get("$ref"))) is not None else []
    return found


def _fits(text: str, kinds: set[str]) -> bool:
    kind = _type(json_text.load(text))
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _python(text: str) -> str | None:
    try:
        return python_values.load(text.strip())
    except NotACall:
        return None
