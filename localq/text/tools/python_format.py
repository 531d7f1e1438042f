"""Calls as a list of Python calls: `<|tool_call_start|>[f(a=1), g(b='x')]<|tool_call_end|>`, of LFM2 and LFM2.5.

Source: the chat template of LiquidAI/LFM2.5-8B-A1B, which writes objects as JSON, other values as Python does, and
strings between single quotes without escapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from localq.text.tools import json_text
from localq.text.tools.declaration import Tool, ToolCall
from localq.text.tools.format import ToolFormat, known_name
from localq.text.tools.python_values import NAME, PythonText
from localq.text.tools.reader import CallReader, NotACall, Reading
from localq.text.tools.rules import Rules, check_key, quote
from localq.text.tools.schema_rules import SchemaRules
from localq.text.tools.stream import Tools

_WORDS = '"True" | "False" | "None"'
_PLAIN = r"[^\x00-\x1f\x7f'\\]"  # a character of a string in single quotes
_OPENING, _CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"


class PythonFormat(ToolFormat):
    """LFM2."""

    name = "python"
    openings: ClassVar[tuple[str, ...]] = (_OPENING,)
    marks: ClassVar[tuple[str, ...]] = (_OPENING, _CLOSING)
    results: ClassVar[tuple[str, ...]] = ("<|tool_response_start|>", "<|tool_response_end|>")
    is_repeated = False

    def __init__(self, writes: bool = False, **given: Any) -> None:
        """writes: calls go back in the content of a message."""
        super().__init__(**given)
        self._writes = writes

    def in_content(self) -> PythonFormat:
        """This format for LFM2, whose template reads no calls."""
        return PythonFormat(writes=True)

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """A list of calls."""
        if not self._writes:
            return ""
        given = ((name, ", ".join(f"{key}={_written(each)}" for key, each in values.items())) for name, values in calls)
        parts = (f"{name}({arguments})" for name, arguments in given)
        return f"{_OPENING}[{', '.join(parts)}]{_CLOSING}"

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read the list up to its closing mark, or to the end of the reply."""
        yield from reader.take(_OPENING)
        start = reader.at
        try:
            written, _ = yield from reader.until(_CLOSING)
        except NotACall:
            written, reader.at = reader.text[start:], len(reader.text)
            written = written[: len(written) - reader.unfinished(_CLOSING)]
        calls = PythonText(written).calls()
        return [ToolCall(known_name(name, tools), arguments) for name, arguments in calls]

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write a list of calls, one or more."""
        rules.add("one", f'"[" pycall "]" {rules.text(_CLOSING)}')
        rules.add("many", f'"[" pycall (", " pycall)* "]" {rules.text(_CLOSING)}')
        rules.add("pycall", " | ".join(_call(rules, tool) for tool in tools))


def _written(value: Any) -> str:
    """A value as LFM2 writes it: strings in double quotes, objects as JSON, other values as Python."""
    return json_text.dump(value) if isinstance(value, (str, dict)) else repr(value)


def _call(rules: Rules, tool: Tool) -> str:
    whole = rules.schema(tool)
    named, required = whole.get("properties") or {}, whole.get("required") or []
    notation = _PythonRules(rules, tool, whole)
    if not named and whole.get("additionalProperties", True) is not False:
        pair = f'{rules.named("K", r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")} "=" {notation.anything()}'
        return f'{quote(f"{tool.name}(")} ({pair} (", " {pair})*)? ")"'
    for key in named:
        check_key(tool, key, NAME)
    pairs = [(f"{quote(f'{key}=')} {notation.value(each)}", key in required) for key, each in named.items()]
    return f'{quote(f"{tool.name}(")} {rules.sequence(pairs, ", ")} ")"'


class _PythonRules(SchemaRules):
    """Values as Python writes them, but objects, which are JSON, as the template writes them."""

    def anything(self) -> str:
        """Any value: JSON, or one of Python's words."""
        return f"({self.rules.json({})} | {_WORDS})"

    def typed(self, node: dict[str, Any], kind: str) -> str:
        """A value of one type. A string without a pattern or format may stand in single quotes."""
        if kind == "boolean":
            return '"True" | "False"'
        if kind == "null":
            return '"None"'
        if kind == "array":
            return self.rules.items(self.value(node.get("items", {})), node, ", ")
        whole = self.json({**node, "type": kind})
        if kind != "string" or {"pattern", "format"} & node.keys():
            return whole
        most = node.get("maxLength", "")
        single = self.rules.named("Q", rf"/'(?:{_PLAIN}|\\['\\nt]){{{node.get('minLength', 0)},{most}}}'/")
        return f"{whole} | {single}"

    def literal(self, value: Any) -> str:
        """One value, as JSON or as Python."""
        return " | ".join(dict.fromkeys(map(quote, (json_text.dump(value), repr(value)))))

    def merged(self, node: dict[str, Any]) -> str:
        """JSON."""
        return self.json(node)
