"""Calls in JSON: `{"name": ..., "arguments": {...}}`, between marks, in a list or bare.

Hermes     `<tool_call>` object `</tool_call>`: Qwen2.5, Qwen3, Hermes, SmolLM3, Granite 4
Llama      the object alone, from the start of the reply or behind `<|python_tag|>`; its key is `parameters`
Mistral    `[TOOL_CALLS]` list; since Mistral Small 3.2 `[TOOL_CALLS]name[ARGS]object`, once for each call
Action     `<|START_ACTION|>` list `<|END_ACTION|>`, with `tool_name` and `parameters`: North, Command A
Phi        `<|tool_call|>` list `<|/tool_call|>`: Phi-4-mini; without the last mark: Granite 3

Sources: the chat templates of Qwen/Qwen3-0.6B, meta-llama/Llama-3.1-8B-Instruct, mistralai/Mistral-Nemo-Instruct-2407,
mistralai/Ministral-3-8B-Instruct-2512, CohereLabs/North-Mini-Code-1.0, microsoft/Phi-4-mini-instruct and
ibm-granite/granite-3.3-2b-instruct.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from localq.text.tools import json_text
from localq.text.tools.declaration import Tool, ToolCall
from localq.text.tools.format import ToolFormat, known_name
from localq.text.tools.reader import CallReader, NotACall, Reading
from localq.text.tools.rules import Rules
from localq.text.tools.stream import Tools

_NAMES, _ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")
_NAME_TEXT = re.compile(r"[a-zA-Z0-9_.-]*")
_LONGEST_NAME = 96  # with a namespace
_LONGEST_ID = 64


def json_call(text: str, tools: Tools, declared: bool = False) -> ToolCall:
    """The call that an object states. declared: only of a declared tool. Raises NotACall for another object."""
    parts = json_text.members(text)
    if isinstance(parts.get("function", ("", ""))[0], dict):  # as OpenAI's API writes a call
        parts = json_text.members(parts["function"][1])
    name = next((parts[key][0] for key in _NAMES if key in parts), None)
    value, written = next((parts[key] for key in _ARGUMENTS if key in parts), (None, ""))
    return ToolCall(known_name(name, tools, declared), json_text.arguments_text(value, written))


def json_calls(text: str, tools: Tools) -> list[ToolCall]:
    """The calls of a list of objects, or of one object."""
    if not text.startswith("["):
        return [json_call(text, tools)]
    return [json_call(written, tools) for _, written in json_text.items(text)]


class HermesFormat(ToolFormat):
    """Objects between tags; several in one pair of tags are read as well."""

    name = "hermes"
    openings: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    results: ClassVar[tuple[str, ...]] = ("<tool_response>", "</tool_response>", "<tool_result>", "</tool_result>")
    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"

    def __init__(self, variable: str = "tools", writes: bool = False) -> None:
        """writes: calls go back in the content of a message."""
        super().__init__(variable)
        self._writes = writes

    def in_content(self) -> ToolFormat | None:
        """This format for a template that reads no calls (SmolLM3)."""
        return type(self)(self.variable, writes=True)

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """The calls as the model wrote them."""
        objects = (json_text.dump({"name": name, "arguments": given}) for name, given in calls)
        return "\n".join(f"{self.opening}\n{each}\n{self.closing}" for each in objects) if self._writes else ""

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read the objects up to the closing tag."""
        yield from reader.take(self.opening)
        calls: list[ToolCall] = []
        while True:
            yield from reader.space()
            first = yield from reader.peek("{", "[")
            if not first:
                break
            calls += json_calls((yield from reader.balanced(first)), tools)
        if not calls:
            raise NotACall
        if self.closing:
            yield from reader.close(self.closing, self.opening)
        return calls

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write an object between tags; calls stand on lines of their own."""
        rules.add("one", f"NL obj NL {rules.text(self.closing)}")
        rules.add("obj", " | ".join(rules.json(_object(tool, "name", "arguments", rules)) for tool in tools))
        rules.add("NL", r"/\n?/")


class ListFormat(HermesFormat):
    """A list of objects between marks."""

    keys: ClassVar[tuple[str, str]] = ("name", "arguments")
    first: ClassVar[dict[str, Any]] = {}  # properties before these two
    is_repeated = False

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """The list as the model wrote it."""
        objects = [{"name": name, "arguments": given} for name, given in calls]
        return f"{self.opening}{json_text.dump(objects)}{self.closing}" if self._writes else ""

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write a list of objects between marks."""
        end = f'WS "]" WS {rules.text(self.closing)}' if self.closing else 'WS "]"'
        rules.add("one", f'WS "[" WS obj {end}')
        rules.add("many", f'WS "[" WS obj (WS "," WS obj)* {end}')
        rules.add("obj", " | ".join(rules.json(_object(tool, *self.keys, rules, self.first)) for tool in tools))
        rules.add("WS", r"/[ \n]{0,8}/")


class PhiFormat(ListFormat):
    """Lists of Phi-4-mini."""

    name = "phi"
    openings: ClassVar[tuple[str, ...]] = ("<|tool_call|>",)
    opening, closing = "<|tool_call|>", "<|/tool_call|>"
    marks: ClassVar[tuple[str, ...]] = (opening, closing)
    results: ClassVar[tuple[str, ...]] = ("<|tool_response|>",)


class GraniteFormat(PhiFormat):
    """Lists of Granite 3, which nothing closes; its template takes them in the content of a message."""

    name = "granite"
    closing = ""
    marks: ClassVar[tuple[str, ...]] = (PhiFormat.opening,)
    results: ClassVar[tuple[str, ...]] = ()


class ActionFormat(ListFormat):
    """Lists of North and Command A."""

    name = "action"
    openings: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>",)
    opening, closing = "<|START_ACTION|>", "<|END_ACTION|>"
    marks: ClassVar[tuple[str, ...]] = (opening, closing)
    results: ClassVar[tuple[str, ...]] = ("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>")
    keys = ("tool_name", "parameters")
    frame = ("<|START_TEXT|>", "<|END_TEXT|>")

    def in_content(self) -> None:
        """None: a template of this family reads calls."""
        return

    first: ClassVar[dict[str, Any]] = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,4}$"}}


class LlamaFormat(ToolFormat):
    """The object alone. Only the name of a declared tool makes it a call: an answer may be JSON, too."""

    name = "llama"
    opening: ClassVar[str] = "<|python_tag|>"
    openings: ClassVar[tuple[str, ...]] = (opening,)
    bare = ("{",)
    no_text: ClassVar[tuple[str, ...]] = (r"\s*\{(?s:.*)",)  # a text that begins so is a call
    marks: ClassVar[tuple[str, ...]] = (opening,)
    is_repeated = False

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read objects, which semicolons part."""
        yield from reader.skip(self.opening)
        calls = []
        while True:
            yield from reader.space()
            calls.append(json_call((yield from reader.balanced()), tools, declared=True))
            start = reader.at
            if not (yield from reader.skip(";")):
                return calls
            yield from reader.space()
            if not (yield from reader.peek("{")):
                reader.at = start
                return calls

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write the object."""
        rules.add("one", "obj")
        rules.add("many", 'obj ("; " obj)*')
        rules.add("obj", " | ".join(rules.json(_object(tool, "name", "parameters", rules)) for tool in tools))

    def start_rule(self, rules: Rules, auto: bool, many: bool) -> str:
        """The object with or without its mark; text does not begin as an object does."""
        block, mark = "many" if many else "one", rules.text(self.opening)
        if not auto:
            rules.add("LEAD", r"/\n{0,2}/")
            return f"LEAD {mark}? {block}"
        marked = super().start_rule(rules, auto, many)
        return f"{block} | {marked}"


class MistralFormat(ToolFormat):
    """A list, or name and object; both are read, whichever the template writes."""

    name = "mistral"
    opening: ClassVar[str] = "[TOOL_CALLS]"
    openings: ClassVar[tuple[str, ...]] = (opening,)
    marks: ClassVar[tuple[str, ...]] = (opening, "[ARGS]", "[CALL_ID]")
    results: ClassVar[tuple[str, ...]] = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]")

    def __init__(self, named: bool, **given: Any) -> None:
        """named: calls are written as name and object."""
        super().__init__(**given)
        self.named = named

    @property
    def is_repeated(self) -> bool:  # type: ignore[override]
        """True if calls that are written as name and object have a mark each."""
        return self.named

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read the list, or one call."""
        yield from reader.take(self.opening)
        yield from reader.space()
        if (first := (yield from reader.peek("[ARGS]", "[", "{"))) in ("[", "{"):
            return json_calls((yield from reader.balanced(first)), tools)
        name = yield from reader.run(_NAME_TEXT, _LONGEST_NAME)
        if (yield from reader.skip("[CALL_ID]")):
            yield from reader.run(_NAME_TEXT, _LONGEST_ID)
        yield from reader.skip("[ARGS]")
        yield from reader.space()
        written = yield from reader.balanced()
        return [ToolCall(known_name(name, tools), json_text.arguments_text(json_text.load(written), written))]

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write a list, or name and object."""
        if self.named:
            args = rules.text("[ARGS]")
            calls = (f"{rules.text(tool.name)} {args} {rules.json(rules.schema(tool))}" for tool in tools)
            rules.add("one", " | ".join(calls))
            return
        rules.add("one", 'WS "[" obj "]"')
        rules.add("many", 'WS "[" obj ("," WS obj)* "]"')
        rules.add("obj", " | ".join(rules.json(_object(tool, "name", "arguments", rules)) for tool in tools))
        rules.add("WS", "/ ?/")


def _object(
    tool: Tool, name: str, arguments: str, rules: Rules, first: dict[str, Any] | None = None
) -> dict[str, Any]:  # fmt: skip
    """The schema of an object that states a call. first: properties before name and arguments."""
    schema = rules.schema(tool)
    lifted: dict[str, Any] = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    parts = {**(first or {}), name: {"const": tool.name}, arguments: schema}
    return {**lifted, "type": "object", "properties": parts, "required": list(parts),
            "additionalProperties": False}  # fmt: skip
