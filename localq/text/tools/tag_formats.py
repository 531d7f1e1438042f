"""Calls in tags, whose parameters are text: XML in looks only. Nothing in them is escaped.

Qwen     <tool_call><function=F><parameter=K> V </parameter></function></tool_call>: Qwen3-Coder, Qwen3.5 to 3.8,
         Nemotron 3; a line end stands on both sides of a value
Seed     the same within <seed:tool_call>: Seed-OSS
atem     <atem:function_calls><atem:invoke name="F"><atem:parameter name="K">V</atem:parameter>...: Muse Glimmer
GLM      <tool_call>F<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>: GLM-4.5 to 4.7, Laguna

A value ends at the first closing tag behind which another part of the call follows, so a value may contain the tag.
Sources: the chat templates of Qwen/Qwen3.8-27B, ByteDance-Seed/Seed-OSS-36B-Instruct, meta-models/Muse-Glimmer-30B,
zai-org/GLM-4.6 and poolside/Laguna-XS-2.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from localq.text.tools import json_text, values
from localq.text.tools.declaration import Tool, ToolCall
from localq.text.tools.format import ToolFormat, known_name
from localq.text.tools.json_formats import json_call
from localq.text.tools.reader import CallReader, NotACall, Reading
from localq.text.tools.rules import Rules, check_key
from localq.text.tools.schema_rules import TextRules
from localq.text.tools.stream import Tools

_KEY = re.compile(r"[^<>\n]*")
_PLAIN_KEY = re.compile(r"[^<>\n\"\s](?:[^<>\n\"]{0,254}[^<>\n\"\s])?")
_LONGEST_KEY = 256


@dataclass(frozen=True)
class CallTags:
    """The texts of one format. line: what stands on both sides of a value, and behind every tag."""

    opening: str
    function: str
    name_end: str
    parameter: str
    key_end: str
    parameter_close: str
    function_close: str
    closing: str
    line: str


QWEN = CallTags(
    "<tool_call>", "<function=", ">", "<parameter=", ">", "</parameter>", "</function>", "</tool_call>", "\n"
)  # fmt: skip
SEED = CallTags(
    "<seed:tool_call>", "<function=", ">", "<parameter=", ">", "</parameter>", "</function>", "</seed:tool_call>", ""
)  # fmt: skip
ATEM = CallTags(
    "<atem:function_calls>", '<atem:invoke name="', '">', '<atem:parameter name="', '">', "</atem:parameter>",
    "</atem:invoke>", "</atem:function_calls>", "",
)  # fmt: skip


class TagFormat(ToolFormat):
    """Functions and parameters in tags; several functions in one block are read as well."""

    name = "qwen"
    tags = QWEN
    openings: ClassVar[tuple[str, ...]] = (
        QWEN.opening,
        QWEN.function,
    )  # Qwen3-Coder leaves the outer tag out now and then
    marks: ClassVar[tuple[str, ...]] = (QWEN.opening, QWEN.closing)
    results: ClassVar[tuple[str, ...]] = ("<tool_response>", "</tool_response>")

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read the functions of a block, or one without a block, which must be declared."""
        tags = self.tags
        has_block = bool((yield from reader.skip(tags.opening)))
        calls: list[ToolCall] = []
        while True:
            yield from reader.space()
            following = yield from reader.peek(tags.function, "{")
            if following == "{" and has_block:  # the form of older models of the family
                calls.append(json_call((yield from reader.balanced()), tools))
                continue
            if following != tags.function:
                break
            calls.append((yield from self._function(reader, tools, declared=not has_block)))
            if not has_block:
                yield from reader.skip(tags.closing)
                return calls
        if not calls:
            raise NotACall
        yield from reader.close(tags.closing, tags.opening)
        return calls

    def _function(self, reader: CallReader, tools: Tools, declared: bool) -> Reading[ToolCall]:
        tags = self.tags
        yield from reader.take(tags.function)
        name = known_name((yield from self._key(reader, tags.name_end)), tools, declared)
        parts: list[tuple[str, str]] = []
        while True:
            yield from reader.space()
            if not (yield from reader.skip(tags.parameter)):
                break
            key = yield from self._key(reader, tags.key_end)
            value = yield from self._value(reader)
            parts.append((key, values.text_value(tools.get(name), key, value)))
        if (yield from reader.peek(tags.function_close, tags.closing)) != tags.closing:  # else it is left out
            yield from reader.take(tags.function_close)
        return ToolCall(name, json_text.object_text(parts))

    def _key(self, reader: CallReader, end: str) -> Reading[str]:
        """Read a name up to the end of its tag."""
        key = yield from reader.run(_KEY, _LONGEST_KEY)
        yield from reader.take(">")
        if not key.endswith(end[:-1]):
            raise NotACall
        return key.removesuffix(end[:-1])

    def _value(self, reader: CallReader) -> Reading[str]:
        """Read a value up to the closing tag that ends it."""
        tags = self.tags
        text = ""
        while True:
            part, _ = yield from reader.until(tags.parameter_close)
            text += part
            start = reader.at
            yield from reader.space()
            if (yield from reader.peek(tags.parameter, tags.function_close, tags.closing)):
                return text.removeprefix(tags.line).removesuffix(tags.line)
            if reader.ended and not reader.rest:
                raise NotACall
            text, reader.at = text + tags.parameter_close, start

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write a block for each call."""
        rules.add("one", " | ".join(self.call_rule(rules, tool) for tool in tools))

    def call_rule(self, rules: Rules, tool: Tool) -> str:
        """A call behind its opening tag."""
        tags = self.tags

        def around(key: str, value: str) -> str:
            return f"{rules.text(tags.parameter)} {key} {rules.text(f'{tags.key_end}{tags.line}')} {value}"

        fields = _fields(rules, tool, around, f"{tags.line}{tags.parameter_close}\n", tags.parameter_close)
        start = rules.text(f"\n{tags.function}{tool.name}{tags.name_end}\n")
        end = rules.text(f"{tags.function_close}\n{tags.closing}")
        return f"{start} {fields} {end}"


class SeedFormat(TagFormat):
    """Seed-OSS."""

    name = "seed"
    tags = SEED
    openings: ClassVar[tuple[str, ...]] = (SEED.opening,)
    marks: ClassVar[tuple[str, ...]] = (SEED.opening, SEED.closing)
    results: ClassVar[tuple[str, ...]] = ()


class PairFormat(ToolFormat):
    """Keys and values in tags of their own."""

    name = "glm"
    openings: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    marks: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    results: ClassVar[tuple[str, ...]] = ("<tool_response>", "</tool_response>", "<|observation|>")

    def __init__(self, line: str = "", **given: Any) -> None:
        """line: what the template writes behind a name and a tag."""
        super().__init__(**given)
        self.line = line

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read the name and the pairs of one call."""
        yield from reader.take("<tool_call>")
        yield from reader.space()
        name = known_name((yield from reader.run(_KEY, _LONGEST_KEY)), tools)
        parts: list[tuple[str, str]] = []
        while True:
            yield from reader.space()
            if not (yield from reader.skip("<arg_key>")):
                break
            key, _ = yield from reader.until("</arg_key>")
            yield from reader.space()
            yield from reader.take("<arg_value>")
            value = yield from self._value(reader)
            parts.append((key.strip(), values.text_value(tools.get(name), key.strip(), value)))
        yield from reader.take("</tool_call>")
        return [ToolCall(name, json_text.object_text(parts))]

    def _value(self, reader: CallReader) -> Reading[str]:
        text = ""
        while True:
            part, _ = yield from reader.until("</arg_value>")
            text += part
            start = reader.at
            yield from reader.space()
            if (yield from reader.peek("<arg_key>", "</tool_call>")):
                return text
            if reader.ended and not reader.rest:
                raise NotACall
            text, reader.at = f"{text}</arg_value>", start

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write a name and its pairs."""
        start, between = rules.text("<arg_key>"), rules.text(f"</arg_key>{self.line}<arg_value>")

        def around(key: str, value: str) -> str:
            return f"{start} {key} {between} {value}"

        def call(tool: Tool) -> str:
            fields = _fields(rules, tool, around, f"</arg_value>{self.line}", "</arg_value>")
            return f"{rules.text(f'{tool.name}{self.line}')} {fields} {rules.text('</tool_call>')}"

        rules.add("one", " | ".join(map(call, tools)))


def _fields(rules: Rules, tool: Tool, around: Callable[[str, str], str], close: str, stop: str) -> str:
    """Parameters of a tool. around: rules of a key, and of its value with `close` -> rule with the tags."""
    whole = rules.schema(tool)
    notation = TextRules(rules, tool, whole, close, stop)
    named, required = whole.get("properties") or {}, whole.get("required") or []
    if not named and whole.get("additionalProperties", True) is not False:
        key = rules.named("K", r'/[^<>\n"]{1,64}/')
        return f"({around(key, notation.anything())})*"
    parts = []
    for key, each in named.items():
        check_key(tool, key, _PLAIN_KEY)
        rule = rules.named("p", around(rules.text(key), notation.value(each)))
        parts.append(rule if key in required else f"{rule}?")
    return " ".join(parts) or '""'
