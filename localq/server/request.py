"""`ReplyRequest`: a reply as every API asks for it, once its fields are checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from localq.sampling import LogitOptions
from localq.text.grammar import Grammar
from localq.text.tools.declaration import Tool

AUTO, NONE, REQUIRED, NAMED = "auto", "none", "required", "named"


@dataclass(frozen=True)
class ChatMessage:
    """A message of a conversation. role: "system", "developer", "user", "assistant" or "tool".

    thought   of an assistant; calls: (id, name, JSON text of the arguments) of each
    call_id   of a tool's result, with the name of the tool
    """

    role: str
    text: str
    thought: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class ToolChoice:
    """mode: AUTO, NONE, REQUIRED, or NAMED with the name of the tool. parallel: more than one call may be made."""

    mode: str = AUTO
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True)
class ReplyRequest:
    """A request for a reply: prompt, sampling and constraints.

    messages  the conversation; where it ends with an assistant's, that is continued
    prompt    instead: plain text, or token ids, to be continued
    sampling  fields of `Sampling` that differ from the model's defaults
    effort    of thinking: "none", "minimal", a level, "on"; "" = the model's default
    wants_thought  the client is shown the thought
    field, grammar_field  fields of the request that hold the conversation and the grammar, for errors
    """

    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    logits: LogitOptions | None = None
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    grammar: Grammar | None = None
    effort: str = ""
    think_budget: int | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    wants_thought: bool = True
    field: str = "messages"
    grammar_field: str = "response_format"

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model is told of."""
        return () if self.tool_choice.mode == NONE else self.tools
