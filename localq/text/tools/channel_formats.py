"""Calls in messages to tools: gpt-oss and Muse Glimmer. `channels` finds the messages, these formats read them.

gpt-oss  `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`
Muse     ` to=NAME<|message|><atem:function_calls>...<|eom|>`; also in a message to the user, where the model errs

Sources: the chat templates of openai/gpt-oss-120b and meta-models/Muse-Glimmer-30B, OpenAI's
articles/openai-harmony.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from localq.text import harmony
from localq.text.tools import json_text
from localq.text.tools.declaration import Tool, ToolCall
from localq.text.tools.format import ToolFormat, known_name
from localq.text.tools.reader import CallReader, NotACall, Reading
from localq.text.tools.rules import ANY, Rules
from localq.text.tools.stream import Tools
from localq.text.tools.tag_formats import ATEM, TagFormat


class HarmonyFormat(ToolFormat):
    """gpt-oss: the recipient names the tool, the message is a JSON object."""

    name = "harmony"
    results: ClassVar[tuple[str, ...]] = harmony.MARKS

    def messages(
        self, messages: Sequence[Mapping[str, Any]], escape: Callable[[str], str] | None = None
    ) -> list[dict[str, Any]]:
        """Messages of which one with a call has all its text as thought: the template refuses both, and writes either
        to the channel of thoughts."""
        made = super().messages(messages, escape)
        for each in made:
            if each.get("tool_calls"):
                texts = (each.pop(self.thoughts, ""), each["content"])
                each["content"], each[self.thoughts] = "", "\n\n".join(filter(None, texts))
        return made

    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Raise NotACall: there are no calls in an answer."""
        yield from reader.more()
        raise NotACall

    def read_message(self, recipient: str, text: str, tools: Tools) -> list[ToolCall]:
        """The call of a message."""
        written = text.strip()
        value = json_text.load(written) if written else {}
        return [ToolCall(known_name(recipient, tools), json_text.arguments_text(value, written or "{}"))]

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write messages of the commentary channel."""
        constrain, message = (rules.text(mark) for mark in ("<|constrain|>", harmony.MESSAGE))
        calls = (
            f"{rules.text(f'to=functions.{tool.name} ')} {constrain} {rules.text('json')} {message} "
            f"{rules.json(rules.schema(tool))}"
            for tool in tools
        )
        rules.add("one", " | ".join(calls))

    def start_rule(self, rules: Rules, auto: bool, many: bool) -> str:
        """A thought, then a call or with `auto` an answer. The model makes one call in a reply."""
        channel, message = rules.text(harmony.CHANNEL), rules.text(harmony.MESSAGE)
        thought = f"{channel} {rules.text('analysis')} {message} {rules.named('TEXT', ANY)}"
        following = rules.text(f"{harmony.END}{harmony.START}assistant")
        said = f"{channel} {rules.text('commentary')} {message} {rules.named('TEXT', ANY)}"
        call = f"{channel} {rules.text('commentary ')} one"
        if auto:
            call += f" | {channel} {rules.text('final')} {message} {rules.named('TEXT', ANY)}"
        return f"({thought} {following})* ({said} {following})? ({call})"


class AtemFormat(TagFormat):
    """Muse Glimmer: tags within a message to the tool."""

    name = "atem"
    tags = ATEM
    openings: ClassVar[tuple[str, ...]] = (ATEM.opening,)
    marks: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[str, ...]] = (*harmony.MARKS, "<tool_output", "</tool_output>")

    def read_message(self, recipient: str, text: str, tools: Tools) -> list[ToolCall]:
        """The calls of a message, whose tags name the tool."""
        return self.read_text(text, tools)

    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write messages to tools."""
        message = rules.text(harmony.MESSAGE)
        rules.add("one", " | ".join(
            f"{rules.text(f' to={tool.name}')} {message} {rules.text(self.tags.opening)} {self.call_rule(rules, tool)}"
            for tool in tools
        ))  # fmt: skip

    def start_rule(self, rules: Rules, auto: bool, many: bool) -> str:
        """A thought, then calls or with `auto` an answer."""
        message, rest = rules.text(harmony.MESSAGE), rules.named("TEXT", ANY)
        following = rules.text(f"{harmony.MUSE_END}{harmony.START}assistant")
        calls = f"one ({following} one)*" if many else "one"
        end = f"({calls})" if not auto else f"({calls} | {rules.text(' to=user')} {message} {rest})"
        return f"({rules.text(' to=self')} {message} {rest} {following})* {end}"
