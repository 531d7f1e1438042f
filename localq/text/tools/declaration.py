"""Tools as a request declares them, and calls as a reply makes them; limits of both.

Names and counts are those of OpenAI's API. A schema is limited in size as a grammar is, because it becomes part of one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localq.errors import usage_error

MOST = 128  # tools of a request
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_BYTES = 2**18  # of all tools together, as JSON; as large as a JSON schema may be (`grammar.MAX_BYTES`)
MAX_DEPTH = 64  # of a schema, and of the arguments of a call
_WHAT = "tools"
_EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: JSON schema for an object. strict: calls must match it.

    Raises LocalqError (exit 2) for a name that is not in `NAME`, and for parameters that are no schema of an object.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: dict(_EMPTY))
    strict: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or NAME.fullmatch(self.name) is None:
            raise usage_error(_WHAT, f"invalid name {str(self.name)[:80]!r}", "Use 1 to 64 letters, digits, _ and -.")
        if not isinstance(self.description, str):
            raise usage_error(f"tool {self.name}", "the description is not a string", "Use a string.")
        kind = self.parameters.get("type", "object") if isinstance(self.parameters, dict) else None
        if kind != "object" or not _is_table(self.parameters.get("properties", {})):
            raise usage_error(f"tool {self.name}", "parameters must be a JSON schema for an object", _AN_OBJECT)
        if _depth(self.parameters) > MAX_DEPTH:
            why = f"parameters are nested more than {MAX_DEPTH} levels deep"
            raise usage_error(f"tool {self.name}", why, "Simplify the schema.")

    def to_dict(self) -> dict[str, Any]:
        """The declaration as chat templates expect it."""
        parts = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": parts}

    @classmethod
    def from_dict(cls, value: Any) -> Tool:
        """A tool from `{"type": "function", "function": {...}}`, or from the inner object. Raises as the class does."""
        inner = value.get("function", value) if isinstance(value, dict) else None
        if not isinstance(inner, dict) or (isinstance(value, dict) and value.get("type", "function") != "function"):
            raise usage_error(_WHAT, 'each tool must have the type "function"', 'Example: {"type": "function", ...}.')
        parameters = inner.get("parameters")
        return cls(
            inner.get("name", ""),
            inner.get("description") or "",
            dict(_EMPTY) if parameters is None else parameters,
            inner.get("strict") is True,
        )


_AN_OBJECT = 'Example: {"type": "object", "properties": {"city": {"type": "string"}}}.'


@dataclass(frozen=True)
class ToolCall:
    """A call that a reply makes. arguments: JSON text of an object, as the model wrote it where that is JSON."""

    name: str
    arguments: str

    def to_dict(self, id: str) -> dict[str, Any]:
        """The call as a message of a conversation has it, with its arguments as an object."""
        return {"id": id, "type": "function", "function": {"name": self.name, "arguments": json.loads(self.arguments)}}


def check(tools: Sequence[Tool]) -> dict[str, Tool]:
    """The tools by name. Raises LocalqError (exit 2) for too many or too large ones, and for two of one name."""
    if len(tools) > MOST:
        raise usage_error(_WHAT, f"too many ({len(tools)})", f"Declare at most {MOST}.")
    named = {tool.name: tool for tool in tools}
    if len(named) < len(tools):
        twice = next(name for name in named if sum(tool.name == name for tool in tools) > 1)
        raise usage_error(_WHAT, f"{twice} is declared twice", "Give each tool a unique name.")
    size = len(json.dumps([tool.to_dict() for tool in tools]))
    if size > MAX_BYTES:
        raise usage_error(
            _WHAT, f"larger than {MAX_BYTES // 1024} KiB", "Declare fewer tools, or shorten their schemas."
        )
    return named


def escape_strings(value: Any, escape: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string in it escaped, keys included."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape(str(key)): escape_strings(each, escape) for key, each in value.items()}
    return [escape_strings(each, escape) for each in value] if isinstance(value, (list, tuple)) else value


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, (dict, bool)) for each in value.values())


def _depth(value: Any) -> int:
    """Levels of objects and lists; counting stops above MAX_DEPTH."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        held = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in held for inner in (each.values() if isinstance(each, dict) else each)]
        depth += bool(held)
        if not held:
            break
    return depth
