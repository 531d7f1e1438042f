"""Events of a reply, which each API writes in its own form."""

from __future__ import annotations

from dataclasses import dataclass

from localq.stats import Stats


@dataclass(frozen=True)
class TokenText:
    """A token of the answer with its log probability. text: by itself, maybe half of a character; top: likeliest."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Started:
    """The prompt is accepted, and is being read. model: its name; prompt_tokens: of the whole prompt."""

    model: str
    prompt_tokens: int


@dataclass(frozen=True)
class AnswerText:
    """Text of the answer; logprobs: of its tokens, where they were asked for."""

    text: str
    logprobs: tuple[TokenText, ...] = ()


@dataclass(frozen=True)
class ThoughtText:
    """Text of the thought."""

    text: str


@dataclass(frozen=True)
class CalledTool:
    """A whole call of a tool. index: its place among the calls of the reply; text: JSON of its arguments."""

    index: int
    name: str
    text: str


@dataclass(frozen=True)
class Finished:
    """The end. reason: "stop", "length", "tool_calls" or "cancelled"; stop_string: the one that was found."""

    reason: str
    stats: Stats
    stop_string: str | None = None
    thought_tokens: int = 0


ReplyEvent = Started | AnswerText | ThoughtText | CalledTool | Finished
