"""`ToolFormat`: how one family declares tools, writes calls and takes results back. The formats are in `formats`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from localq.errors import usage_error
from localq.text.grammar import Grammar
from localq.text.tools import conversation, declaration
from localq.text.tools.declaration import NAME, Tool, ToolCall
from localq.text.tools.reader import CallReader, NotACall, Reading
from localq.text.tools.rules import Rules, contains
from localq.text.tools.stream import Tools, ToolStream

CHOICES = ("auto", "required")
_CHOICE = "tool choice"


class ToolFormat(ABC):
    """One format; it keeps no state.

    name        for messages and tests
    openings    texts with which a call begins, in an answer
    bare        texts with which one begins at the start of a reply, without a mark
    marks       texts in a call that are special tokens of some tokenizers: a detokenizer must show them
    results     texts around results that a result must not contain
    is_repeated each call has an opening mark of its own; between: text that may stand between two of them
    no_text     regular expressions of what else is no text beside calls
    frame       marks that the model may write around the text of an answer
    variable    of the chat template, that takes the declared tools
    is_single   the template takes one call in a message only
    thoughts    field of a message with its thought, in this template
    ids         what the template wants of the id of a call: "" anything, or a form (`conversation.IDS`)
    """

    name: ClassVar[str]
    openings: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[str, ...]] = ()
    is_repeated: ClassVar[bool] = True
    between: ClassVar[str] = "\n"
    no_text: ClassVar[tuple[str, ...]] = ()
    frame: ClassVar[tuple[str, str]] = ("", "")

    def __init__(self, variable: str = "tools", is_single: bool = False, ids: str = "") -> None:
        self.variable, self.is_single, self.ids = variable, is_single, ids
        self.thoughts = "reasoning_content"

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """A parser of one reply. Raises LocalqError (exit 2) as `declaration.check`."""
        return ToolStream(self, declaration.check(tools))

    def grammar(
        self, tools: Sequence[Tool], choice: str = "required", tokens: Mapping[str, int] | None = None,
        parallel: bool = True,
    ) -> Grammar:  # fmt: skip
        """A grammar of replies with calls of these tools.

        choice    "required": at least one call and nothing else; the name of a tool: one call of it; "auto": text and
                  calls, of which those of strict tools match their schema
        tokens    `Tokenizer.grammar_tokens`: marks that are tokens of the model, with their ids
        parallel  whether more than one call is allowed

        The grammar holds where the answer begins: behind a thought in tags (`Generate.grammar_after`). Of a reply in
        channels it is the whole reply, thoughts included: its prompt must not open the answer, and no `think_budget`
        must end the thought.

        Raises LocalqError (exit 2) for an unknown choice, for schemas that no grammar enforces (`text.schema`), and for
        tools that are too large.
        """
        named = declaration.check(tools)
        if choice not in CHOICES and choice not in named:
            raise usage_error(
                _CHOICE,
                f"no tool with this name is declared: {choice[:80]!r}",
                'Name a declared tool, or use "required".',
            )
        if not named:
            raise usage_error(_CHOICE, "no tools are declared", "Declare a tool.")
        rules = Rules(tokens or {}, only_strict=choice == "auto")
        try:
            self.write_rules(rules, list(named.values()) if choice in CHOICES else [named[choice]])
            rules.add("start", self.start_rule(rules, choice == "auto", parallel and choice in CHOICES))
        except RecursionError:
            raise usage_error("tools", "a schema is nested too deeply", "Simplify the schema.") from None
        return Grammar("lark", rules.lark())

    def variables(self, tools: Sequence[Tool], escape: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Variables of the chat template that declare tools. escape: `TurnMarks.escape`, for texts of strangers."""
        declared = [tool.to_dict() for tool in declaration.check(tools).values()]
        return {self.variable: declaration.escape_strings(declared, conversation.safe(self, escape))}

    def messages(
        self, messages: Sequence[Mapping[str, Any]], escape: Callable[[str], str] | None = None
    ) -> list[dict[str, Any]]:
        """Messages with calls and results as this family's template takes them.

        escape: `TurnMarks.escape`; it is applied to results and arguments, and to nothing else. Raises LocalqError
        (exit 2) for a result of no call, and for arguments that are no object.
        """
        return conversation.prepare(messages, self, escape)

    def read_message(self, recipient: str, text: str, tools: Tools) -> list[ToolCall]:
        """The calls of a message to a tool, of a reply in channels. Raises NotACall for a message that is none."""
        raise NotACall

    def start_rule(self, rules: Rules, auto: bool, many: bool) -> str:
        """The start of a grammar: calls, or with `auto` text and calls; many: more than one call."""
        opening = self.openings[0]
        block = "many" if many and not self.is_repeated else "one"
        again = many and self.is_repeated
        if auto:
            return rules.text_and(opening, [*map(contains, self.openings), *self.no_text], block, many, self.frame)
        rules.add("LEAD", r"/\n{0,2}/")  # which templates write behind a thought
        more = f"({rules.text(self.between)}? {rules.text(opening)} {block})*" if again else ""
        return f"LEAD {rules.text(opening)} {block} {more}"

    def read_text(self, text: str, tools: Tools) -> list[ToolCall]:
        """The calls of a whole text, which has nothing else. Raises NotACall for another one."""
        reader = CallReader(text.strip())
        reader.ended = True
        reading = self.read(reader, tools)
        try:
            next(reading)
        except StopIteration as done:
            if not reader.rest.strip():
                found: list[ToolCall] = done.value
                return found
        raise NotACall

    def in_content(self) -> ToolFormat | None:
        """This format for a template that takes calls in the content of a message; None where nothing writes them."""
        return None

    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        """The text of calls, name and arguments, for a content; "" for a template that writes them itself."""
        return ""

    @abstractmethod
    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]:
        """Read calls from their opening mark on."""

    @abstractmethod
    def write_rules(self, rules: Rules, tools: Sequence[Tool]) -> None:
        """Write the rule `one` of a grammar: a call of one of these tools, behind its opening mark; where a block has
        several calls (`is_repeated` is False), also `many`: one or more calls."""


def known_name(name: object, tools: Tools, declared: bool = False) -> str:
    """A tool's name as it is declared. declared: it must be. Raises NotACall for what is no name."""
    if not isinstance(name, str):
        raise NotACall
    plain = name.strip()
    if plain not in tools and (last := plain.rpartition(".")[2]) in tools:  # a namespace, such as `functions.`
        plain = last
    if plain not in tools and (declared or NAME.fullmatch(plain) is None):
        raise NotACall
    return plain
