"""Calls of Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>`.

A string stands between two marks and has no escapes; numbers, `true`, `false`, `null`, lists and tables are bare, as
are keys. Strings and keys in JSON's quotes are read as well. Source: the chat template of google/gemma-4-31B-it of July
2026 (macro format_argument), whose keys are sorted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from localq.errors import usage_error
from localq.text.tools import json_text, python_values
from localq.text.tools.declaration import MAX_DEPTH, Tool, ToolCall
from localq.text.tools.format import ToolFormat, known_name
from localq.text.tools.reader import CallReader, NotACall, Reading
from localq.text.tools.rules import Rules, check_key, quote
from localq.text.tools.schema_rules import SchemaRules, text_value
from localq.text.tools.stream import Tools

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_KEY = re.compile(r"[^:,{}\[\]<\"]*")
_PLAIN_KEY = re.compile(r"[^:,{}\[\]<\"\s](?:[^:,{}\[\]<\"\n]*[^:,{}\[\]<\"\s])?")
_BARE = re.compile(r"[^,{}\[\]<]*")
_LONGEST_NAME, _LONGEST_KEY, _LONGEST_BARE = 96, 256, 4096


class GemmaFormat(ToolFormat):
    """Gemma 4."""

    name = "gemma"
    openings: ClassVar[tuple[str, ...]] = (_OPENING,)
    marks: ClassVar[tuple[str, ...]] = (_OPENING, _CLOSING, _QUOTE)
    results: ClassVar[tuple[str, ...]] = ("<|tool_response>", "<tool_response|>")
    between = ""

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read the name and the table of one call."""
        yield from reader.take(_OPENING)
        yield from reader.space()
        yield from reader.take("call:")
        yield from reader.space()
        name = known_name((yield from reader.run(_NAME, _LONGEST_NAME)), tools)
        yield from reader.space()
        yield from reader.take("{")
        written = yield from _table(reader, 1)
        yield from reader.close(_CLOSING, _OPENING)
        return [ToolCall(name, written)]

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write the name and the table of each tool."""
        rules.add("gstring", f"{rules.text(_QUOTE)} {text_value(rules, {}, _QUOTE, _QUOTE)}")
        rules.add("gkey", r"/[A-Za-z_][\w.-]{0,63}/")
        rules.add("gtable", '"{" (gkey ":" gany ("," gkey ":" gany)*)? "}"')
        rules.add("glist", '"[" (gany ("," gany)*)? "]"')
        number = rules.json({"type": "number"})
        rules.add("gany", f'gstring | {number} | "true" | "false" | "null" | glist | gtable')
        calls = []
        for tool in tools:
            whole = rules.schema(tool)
            table = _GemmaRules(rules, tool, whole).table(whole)
            calls.append(f"{rules.text(f'call:{tool.name}')} {table} {rules.text(_CLOSING)}")
        rules.add("one", " | ".join(calls))


def _table(reader: CallReader, depth: int) -> Reading[str]:
    """Read a table behind its brace; return JSON text."""
    parts: list[tuple[str, str]] = []
    while not (yield from reader.skip("}")):
        yield from reader.space()
        if mark := (yield from reader.peek(_QUOTE, '"')):
            key = json_text.load((yield from _string(reader, mark)))
        else:
            key = (yield from reader.run(_KEY, _LONGEST_KEY)).strip()
        yield from reader.space()
        yield from reader.take(":")
        parts.append((key, (yield from _value(reader, depth))))
        if not (yield from reader.skip(",")):
            yield from reader.space()
            yield from reader.take("}")
            break
    return json_text.object_text(parts)


def _value(reader: CallReader, depth: int) -> Reading[str]:
    """Read a value; return JSON text."""
    if depth > MAX_DEPTH:
        raise NotACall
    yield from reader.space()
    mark = yield from reader.peek(_QUOTE, '"', "{", "[")
    if mark in (_QUOTE, '"'):
        return (yield from _string(reader, mark))
    if mark:
        yield from reader.take(mark)
        return (yield from (_table if mark == "{" else _list)(reader, depth + 1))
    text = (yield from reader.run(_BARE, _LONGEST_BARE)).strip()
    return python_values.word(text)


def _list(reader: CallReader, depth: int) -> Reading[str]:
    """Read a list behind its bracket; return JSON text."""
    parts: list[str] = []
    while not (yield from reader.skip("]")):
        parts.append((yield from _value(reader, depth)))
        if not (yield from reader.skip(",")):
            yield from reader.space()
            yield from reader.take("]")
            break
    return "[" + ", ".join(parts) + "]"


def _string(reader: CallReader, mark: str) -> Reading[str]:
    """Read a string; return JSON text."""
    if mark == '"':
        return json_text.dump(json_text.load((yield from reader.quoted())))
    yield from reader.take(mark)
    text, _ = yield from reader.until(mark)
    return json_text.dump(text)


class _GemmaRules(SchemaRules):
    """Values in Gemma's notation."""

    def table(self, node: dict[str, Any]) -> str:
        """The rule of an object; its keys are sorted, as the template writes them."""
        named = node.get("properties") or {}
        if not named:
            return "gtable" if node.get("additionalProperties", True) is not False else '"{" "}"'
        required = node.get("required") or []
        for key in named:
            check_key(self.tool, key, _PLAIN_KEY)
        pairs = [
            (f"{quote(f'{key}:')} {self.value(named[key])}", key in required)
            for key in sorted(named, key=lambda each: (each.lower(), each))
        ]
        return f'"{{" {self.rules.sequence(pairs, ",")} "}}"'

    def anything(self) -> str:
        """Any value."""
        return "gany"

    def typed(self, node: dict[str, Any], kind: str) -> str:
        """A value of one type."""
        if kind == "string":
            return f"{self.rules.text(_QUOTE)} {text_value(self.rules, node, _QUOTE, _QUOTE)}"
        if kind == "object":
            return self.rules.named("o", self.table(node))
        if kind == "array":
            return self.rules.items(self.value(node.get("items", {})), node, ",")
        if kind == "boolean":
            return '"true" | "false"'
        return '"null"' if kind == "null" else self.json({**node, "type": kind})

    def literal(self, value: Any) -> str:
        """One value."""
        if isinstance(value, str):
            mark = self.rules.text(_QUOTE)
            return f"{mark} {quote(value)} {mark}"
        if isinstance(value, (dict, list)):
            raise usage_error(f"tool {self.tool.name}", "an enum contains a list or an object", "Use plain values.")
        return quote(json_text.dump(value))
