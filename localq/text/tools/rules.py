"""Grammars of tool calls, in llguidance's Lark, made from the schemas that tools declare.

JSON is embedded as `%json SCHEMA`; other notations have rules for each value (`schema_rules`). Parameters stand in the
order of the schema.

A mark that is a token of the model is named by its id, `<[id]>`: llguidance matches no text with special tokens, and
takes every added token in angle brackets for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from localq.errors import usage_error
from localq.text import schema
from localq.text.tools.declaration import Tool

_WHITESPACE = r" |\n[ \t]{0,40}"  # as `grammar` has it for JSON schemas
_MOST_ITEMS = 10_000  # a larger minItems or maxItems makes a grammar too large
ANY = "/(?s:.*)/"
TEXT = r"[^\x00-\x08\x0b-\x1f\x7f]"  # a character that `sanitize` leaves in a reply
DEFINITIONS = ("$defs", "definitions")


class Rules:
    """The rules of one grammar. tokens: see `ToolFormat.grammar`.

    only_strict  schemas of tools that are not strict do not count
    """

    def __init__(self, tokens: Mapping[str, int], only_strict: bool = False) -> None:
        self.tokens, self._only_strict = tokens, only_strict
        self._rules: dict[str, str] = {}
        self._named: dict[str, str] = {}  # what a rule says -> its name
        marks = sorted(tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, marks)) or "(?!)")

    def add(self, name: str, text: str) -> None:
        """Add a rule. A name in capitals is a terminal."""
        self._rules[name] = text

    def lark(self) -> str:
        """The text of the grammar."""
        return "\n".join(f"{name}: {text}" for name, text in self._rules.items()) + "\n"

    def text(self, text: str) -> str:
        """A literal, in which marks are tokens."""
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [quote(text[at : found.start()]), f"<[{self.tokens[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, quote(text[at:])])) or '""'

    def json(self, value: dict[str, Any]) -> str:
        """The name of a rule for JSON of this schema."""
        settings = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
        return self.named("j", "%json " + json.dumps({**value, "x-guidance": settings}))

    def named(self, prefix: str, text: str, attribute: str = "") -> str:
        """The name of a rule of this text; one rule for equal texts. A prefix in capitals makes a terminal."""
        key = attribute + text
        if key not in self._named:
            self._named[key] = f"{prefix}{len(self._named)}"
            self.add(self._named[key] + attribute, text)
        return self._named[key]

    def unused(self, prefix: str) -> str:
        """A name for a rule that refers to itself, and is added later."""
        name = f"{prefix}{len(self._named)}"
        self._named[f"{prefix} {name}"] = name
        return name

    def sequence(self, parts: list[tuple[str, bool]], between: str) -> str:
        """Parts in their order, of which some are required, with a separator between two. parts: (rule, required).

        Two rules for each place: of what may follow where no part is written yet, and where one is.
        """
        first = later = '""'
        for rule, required in reversed(parts):
            part = self.named("f", rule)
            after = self.named("f", later)
            begun, going = f"{part} {after}", f"{quote(between)} {part} {after}"
            first = begun if required else f"({begun} | {first})"
            later = going if required else f"({going} | {after})"
        return first

    def items(self, item: str, node: dict[str, Any], between: str) -> str:
        """A list of items in brackets, as many as the schema `node` allows."""
        named, least, most = self.named("v", item), _count(node.get("minItems")) or 0, _count(node.get("maxItems"))
        if most == 0:
            return '"[" "]"'
        low, high = max(0, least - 1), "" if most is None else most - 1
        some = f"{named} ({quote(between)} {named}){{{low},{high}}}"
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def text_and(
        self, opening: str, without: Sequence[str], block: str, many: bool, frame: tuple[str, str] = ("", "")
    ) -> str:
        """A rule of text in which blocks stand behind their opening mark.

        without: expressions of what is no text; frame: tokens that may stand around a text.

        The lexer takes the longest text. Where the mark is no token it would take that too, so text and mark are one
        lexeme, which is lazy: it ends with the first mark.
        """
        body = " & ".join([ANY, *(f"~/{each}/" for each in without)])
        rest, times = self.named("TEXT", body), "*" if many else "?"
        if frame[0] in self.tokens:
            start, end = map(self.text, frame)
            rest = self.named("said", f"{rest} | {start} {rest} {end}? {rest}")
        if opening in self.tokens:
            return f"{rest} ({self.text(opening)} {block} {rest}){times}"
        return f"({self.lazy(f'({body})', opening)} {block}){times} {rest}"

    def lazy(self, body: str, end: str) -> str:
        """The name of a lexeme that ends with the first `end`."""
        return self.named("u", f"{self.named('U', f'{body} {quote(end)}')}", "[lazy]")

    def schema(self, tool: Tool) -> dict[str, Any]:
        """The schema of a tool's arguments, as llguidance takes it."""
        if self._only_strict and not tool.strict:
            return {"type": "object"}
        wanted: dict[str, Any] = {"type": "object", **tool.parameters}
        if not tool.strict:
            wanted["x-guidance"] = {"lenient": True}
        try:
            prepared = schema.prepare(wanted).schema
        except schema.UnsupportedKeyword as error:
            why = f'"{error.keyword}" at {error.path} is not supported'
            raise usage_error(f"tool {tool.name}", why, "Remove the keyword, or remove `strict`.") from None
        if not tool.strict:
            prepared = _without_patterns(prepared)
        prepared.pop("x-guidance", None)
        prepared.pop("$schema", None)
        return prepared if isinstance(prepared, dict) else {"type": "object"}


def _without_patterns(node: Any) -> Any:
    """A schema without `pattern`: expressions of JavaScript may be none of Rust's."""
    if isinstance(node, dict):
        kept = {key: each for key, each in node.items() if not (key == "pattern" and isinstance(each, str))}
        return {key: _without_patterns(each) for key, each in kept.items()}
    return [_without_patterns(each) for each in node] if isinstance(node, list) else node


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _MOST_ITEMS else None


def check_key(tool: Tool, key: str, allowed: re.Pattern[str]) -> None:
    """Raise LocalqError (exit 2) for the name of a parameter that a format cannot write."""
    if allowed.fullmatch(key) is None:
        why = f"this model's tool format cannot represent the parameter name {key[:80]!r}"
        raise usage_error(f"tool {tool.name}", why, "Rename the parameter.")


def contains(text: str) -> str:
    """A regular expression of every text that contains `text`."""
    return f"(?s:.*){regex_of(text)}(?s:.*)"


def quote(text: str) -> str:
    """A literal of Lark; "" for an empty one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def regex_of(text: str) -> str:
    """A regular expression that matches `text`, as it stands between slashes."""
    return re.sub(r"[.*+?()|\[\]{}^$#&~/\\-]", r"\\\g<0>", text).replace("\n", r"\n")
