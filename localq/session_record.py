"""What is kept of a conversation besides what was said: the model, a title, the settings of its replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from localq import thinking
from localq.conversation import Compacted, Conversation
from localq.grammar import Grammar
from localq.sampling import Sampling
from localq.stops import checked


@dataclass(frozen=True)
class ChatSettings:
    """How replies are made. max_tokens None = until a stop token; stop: strings that an answer ends before.

    think    "auto", "on", "off" or a level
    grammar  that every answer keeps to
    """

    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    think: str = "auto"
    grammar: Grammar | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ChatSettings:
        """Inverse of `dataclasses.asdict` through JSON. Raises LocalqError for values that are none."""
        think, grammar = thinking.checked(fields.get("think", "auto")), fields.get("grammar")
        chosen = Sampling(**fields["sampling"]), fields["max_tokens"], checked(fields["stop"])
        return cls(*chosen, think, Grammar(**grammar) if grammar is not None else None)


@dataclass
class Session:
    """A conversation with what belongs to it. `id` is None, and `rows` (of its turns and summaries) are empty, until it
    is saved."""

    conversation: Conversation = field(default_factory=Conversation)
    model: str = ""
    title: str = ""
    settings: ChatSettings | None = None
    id: int | None = None
    rows: list[int] = field(default_factory=list)
    summary_rows: dict[Compacted, int] = field(default_factory=dict)

    def name(self) -> str:
        """Its title, or what the user said first."""
        return self.title or self.conversation.title()


@dataclass(frozen=True)
class Summary:
    """A line in a list of conversations. `turns` counts those of all branches; `changed_s` is Unix time."""

    id: int
    title: str
    model: str
    turns: int
    changed_s: float
