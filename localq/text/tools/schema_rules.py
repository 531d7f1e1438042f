"""Rules of values that are not written as JSON, made from a JSON schema: alternatives, references, types.

`SchemaRules` walks a schema; a notation says how a value of one type is written. `TextRules` is that of values in tags:
strings are text up to the tag that ends them, all other types JSON.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from localq.errors import usage_error
from localq.text import schema_objects
from localq.text.ascii_classes import ascii_classes
from localq.text.tools import json_text, values
from localq.text.tools.declaration import Tool
from localq.text.tools.rules import DEFINITIONS, TEXT, Rules, contains, quote

_LONGEST = 4096  # a larger minLength or maxLength makes a grammar too large


class SchemaRules(ABC):
    """Rules of one tool's values in one notation. whole: the schema of its arguments (`Rules.schema`)."""

    def __init__(self, rules: Rules, tool: Tool, whole: dict[str, Any]) -> None:
        self.rules, self.tool, self.whole = rules, tool, whole
        self._references: dict[str, str] = {}

    def value(self, node: Any) -> str:
        """The rule of a value of this schema."""
        if not isinstance(node, dict):
            return self.anything()
        if (reference := node.get("$ref")) is not None:
            return self._reference(str(reference))
        listed = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(listed, list) and listed:
            return "(" + " | ".join(map(self.literal, listed)) + ")"
        if len(every := node.get("allOf") or []) > 1:
            return self.merged(node)
        if branches := node.get("anyOf") or node.get("oneOf") or every:
            return "(" + " | ".join(map(self.value, branches)) + ")"
        kinds = node.get("type", [])
        names = [kinds] if isinstance(kinds, str) else [each for each in kinds if isinstance(each, str)]
        return "(" + " | ".join(self.typed(node, kind) for kind in names) + ")" if names else self.anything()

    def merged(self, node: dict[str, Any]) -> str:
        """The rule of a value that several schemas allow together."""
        raise usage_error(
            f"tool {self.tool.name}",
            "this model's tool format does not support allOf with several schemas",
            "Merge them.",
        )

    def json(self, node: dict[str, Any]) -> str:
        """The rule of JSON of a schema in the whole one."""
        return self.rules.json({**{key: self.whole[key] for key in DEFINITIONS if key in self.whole}, **node})

    @abstractmethod
    def anything(self) -> str:
        """The rule of any value."""

    @abstractmethod
    def typed(self, node: dict[str, Any], kind: str) -> str:
        """The rule of a value of one type."""

    @abstractmethod
    def literal(self, value: Any) -> str:
        """The rule of one value."""

    def _reference(self, reference: str) -> str:
        """The rule of a reference, which may lead back to itself."""
        if reference not in self._references:
            target = schema_objects.resolve(self.whole, reference)
            if target is None:
                raise usage_error(f"tool {self.tool.name}", f"{reference[:80]} does not exist", "Correct $ref.")
            name = self._references[reference] = self.rules.unused("r")
            self.rules.add(name, self.value(target))
        return self._references[reference]


class TextRules(SchemaRules):
    """Values between tags. close: the text behind a value; stop: its part that a value must not contain."""

    def __init__(self, rules: Rules, tool: Tool, whole: dict[str, Any], close: str, stop: str) -> None:
        super().__init__(rules, tool, whole)
        self._close, self._stop = close, stop

    def anything(self) -> str:
        """Any text."""
        return text_value(self.rules, {}, self._close, self._stop)

    def typed(self, node: dict[str, Any], kind: str) -> str:
        """Text, or JSON."""
        if kind == "string":
            return text_value(self.rules, node, self._close, self._stop)
        return f"{self.json({**node, 'type': kind})} {self.rules.text(self._close)}"

    def literal(self, value: Any) -> str:
        """A string as it is, another value as JSON."""
        text = value if isinstance(value, str) else json_text.dump(value)
        return f"{quote(text)} {self.rules.text(self._close)}"

    def merged(self, node: dict[str, Any]) -> str:
        """JSON, or any text where it may be a string."""
        if "string" in values.types(self.whole, node):
            return self.anything()
        return f"{self.json(node)} {self.rules.text(self._close)}"


def text_value(rules: Rules, own: dict[str, Any], close: str, stop: str) -> str:
    """The rule of a string that ends with `close`; `stop`, a part of it, is not in the string. own: its schema."""
    parts = [f"/{TEXT}*/", f"~/{contains(stop)}/"]
    least, most = (_length(own.get(key)) for key in ("minLength", "maxLength"))
    if least or most is not None:
        parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(own.get("pattern"), str):
        parts.append(f"/{whole_pattern(own['pattern'])}/")
    body = " & ".join(parts)
    if stop in rules.tokens:
        return f"{rules.named('T', body)} {rules.text(close)}"
    return rules.lazy(f"({body})", close)


def whole_pattern(pattern: str) -> str:
    """A pattern that may match anywhere, as an expression of the whole text between slashes."""
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if "|" in pattern:
        start = end = False
    inner = ascii_classes(pattern.removeprefix("^") if start else pattern)
    inner = inner[:-1] if end else inner
    text = f"{'' if start else '(?s:.*)'}(?:{inner}){'' if end else '(?s:.*)'}"
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", text).replace("\n", r"\n")


def _length(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _LONGEST else None
