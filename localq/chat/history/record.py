"""`Record`: a conversation as it is saved, with its model, title and settings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from localq.chat.attachments import AttachedFile
from localq.chat.history.conversation import Conversation, Message, Turn, TurnSummary
from localq.chat.history.tool_rounds import rounds_from
from localq.chat.stop_strings import validate
from localq.sampling import Sampling
from localq.settings import Origin, Settings
from localq.stats import Stats
from localq.text import thinking
from localq.text.grammar import Grammar


@dataclass(frozen=True)
class ChatSettings:
    """Settings of the replies. max_tokens None: the default length; stop: stop strings.

    think       "auto", "on", "off" or a level
    grammar     constraint of every answer
    loop_guard  a reply that repeats itself is stopped
    think_budget, preserve_thinking  as in `ChatSession`
    origins     path of the project's file that has decided a setting, or the system prompt or model, by its name
    """

    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    think: str = "auto"
    grammar: Grammar | None = None
    loop_guard: bool = True
    origins: dict[str, str] = field(default_factory=dict, hash=False)
    think_budget: int | None = None
    preserve_thinking: str = "auto"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ChatSettings:
        """Inverse of `dataclasses.asdict` through JSON. Raises LocalqError for invalid values."""
        think, grammar = thinking.validate(fields.get("think", "auto")), fields.get("grammar")
        chosen = Sampling(**fields["sampling"]), fields["max_tokens"], validate(fields["stop"])
        guard = bool(fields.get("loop_guard", True))
        origins = {str(name): str(path) for name, path in dict(fields.get("origins") or {}).items()}
        more = Settings(
            think_budget=fields.get("think_budget"), preserve_thinking=fields.get("preserve_thinking", "auto")
        )  # checks them
        bound = Grammar(**grammar) if grammar is not None else None
        return cls(*chosen, think, bound, guard, origins, more.think_budget, more.preserve_thinking)


@dataclass
class Record:
    """A conversation with its model, title and settings. Until it is saved, `id` is None and the `rows` are empty."""

    conversation: Conversation = field(default_factory=Conversation)
    model: str = ""
    title: str = ""
    settings: ChatSettings | None = None
    id: int | None = None
    rows: list[int] = field(default_factory=list)
    summary_rows: dict[TurnSummary, int] = field(default_factory=dict)

    def name(self) -> str:
        """Its title, or the first words of its first message."""
        return self.title or self.conversation.title()

    def origins(self) -> dict[str, Origin]:
        """Saved settings that a project's file has decided: value and path."""
        if (chosen := self.settings) is None:
            return {}
        values = {**asdict(chosen.sampling), "max_tokens": chosen.max_tokens, "think": chosen.think}
        values["think_budget"] = chosen.think_budget
        values |= {"system": self.conversation.system, "model": self.model}
        return {name: Origin(values[name], path) for name, path in chosen.origins.items() if name in values}


@dataclass(frozen=True)
class RecordSummary:
    """A line in a list of conversations. `turns` counts those of all branches; `changed_s` is Unix time."""

    id: int
    title: str
    model: str
    turns: int
    changed_s: float


def from_rows(
    id: int, found: tuple[Any, ...], turns: list[tuple[Any, ...]], summaries: list[tuple[Any, ...]]
) -> Record:
    """The conversation `id` from its rows in the database. Raises ValueError and others for inconsistent rows."""
    title, model, system, settings, head = found
    place = {row[0]: index for index, row in enumerate(turns)}
    read = [
        _turn(
            text(role),
            text(content),
            bool(complete),
            None if parent is None else place[parent],
            float(created_s),
            stats,
        )
        for _, parent, role, content, complete, created_s, stats in turns
    ]
    for index, turn in enumerate(read):
        before = "assistant" if turn.parent is None else read[turn.parent].message.role
        if {before, turn.message.role} != {"user", "assistant"} or (turn.parent or 0) > index:
            raise ValueError("turns that do not follow each other")
    known_rows = {
        TurnSummary(text(words), place[upto], place[made_at]): int(row) for row, upto, made_at, words in summaries
    }
    if any(read[each.upto].message.role != "assistant" for each in known_rows):
        raise ValueError("a summary that ends within an exchange")
    prompt = None if system is None else text(system)
    conversation = Conversation(read, None if head is None else place[head], prompt, list(known_rows))
    known = json.loads(settings)
    chosen = None if known is None else ChatSettings.from_dict(known)
    return Record(conversation, text(model), text(title), chosen, id, [row[0] for row in turns], known_rows)


def text(value: str | bytes) -> str:
    """A text of the database: another program may have put bytes there. Raises TypeError for anything else."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of a text")
    return value


def turn_facts(turn: Turn) -> str | None:
    """JSON of what a turn has besides its text: statistics, model, calls of a reply; attachments of a message."""
    facts: dict[str, Any] = {} if turn.stats is None else asdict(turn.stats)
    if turn.stats is not None and turn.model:
        facts["model"] = turn.model
    if turn.message.attachments:
        facts["attachments"] = [asdict(each) for each in turn.message.attachments]
    if turn.message.rounds:
        facts["rounds"] = [asdict(each) for each in turn.message.rounds]
    return json.dumps(facts) if facts else None


def _turn(role: str, content: str, complete: bool, parent: int | None, created_s: float, facts: str | None) -> Turn:
    """Inverse of `turn_facts`. Versions that know statistics alone ignore the other facts."""
    known = {} if facts is None else json.loads(facts)
    attached = tuple(AttachedFile(**each) for each in known.pop("attachments", ()))
    if not all(each.is_valid() for each in attached) or sum(each.length for each in attached) > len(content):
        raise ValueError("attachments that are not those of the message")
    rounds = rounds_from(known.pop("rounds", ()))
    model = str(known.pop("model", ""))
    stats = {each.name: known[each.name] for each in fields(Stats) if each.name in known}
    message = Message(role, content, complete, attached, rounds)
    return Turn(message, parent, created_s, Stats(**stats) if stats else None, model)
