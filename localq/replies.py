"""What a chat gives to a front end while a reply streams: pieces, and the end with what is to be told. Torch-free."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from localq import overflow
from localq.grammar import Grammar, keeps
from localq.stats import Stats

_REASONS = {
    "context": "the context is full: the reply stops here, and the next message leaves out the oldest turns; "
    "/compact sums them up instead, /clear starts anew",
    "length": "the reply reached its longest allowed length",
    "cancelled": "stopped",
}
_NO_ANSWER = " while the model was still thinking: there is no answer yet"
_CUT = ", so it is incomplete: it does not keep to {} yet"


@dataclass(frozen=True)
class Piece:
    """Part of a reply as it streams; `text` may be empty while the prompt is read. `notice`: a line for the user.

    thinking  the text is part of the thought, not of the answer
    """

    text: str
    stats: Stats
    notice: str = ""
    thinking: bool = False


@dataclass(frozen=True)
class Reply:
    """The end of a reply: the whole answer, why it ended ("stop", "length", "context", "cancelled"), what to tell.

    text     the answer: all pieces that are not thinking
    thought  what the model thought before it: all pieces that are
    """

    text: str
    reason: str
    stats: Stats
    notices: tuple[str, ...] = ()
    thought: str = ""


Replies = Generator[Piece | Reply, None, None]


def notices(
    reason: str, stats: Stats, warned_before: bool, thinking: bool, grammar: Grammar | None = None, answer: str = ""
) -> tuple[str, ...]:
    """What to tell at the end. `thinking`: its thought was cut. `warned_before`: of a context nearly full."""
    cut = _NO_ANSWER if thinking else _unmet(grammar, answer)
    told = [_REASONS[reason] + cut] if reason in _REASONS else []
    if reason != "context" and stats.context_fill >= overflow.WARNING and not warned_before:
        told.append(overflow.warning(stats.context_used, stats.context_size))
    return tuple(told)


def _unmet(grammar: Grammar | None, answer: str) -> str:
    """What to add about an answer that was cut."""
    return "" if grammar is None or keeps(grammar, answer) else _CUT.format(grammar.called)
