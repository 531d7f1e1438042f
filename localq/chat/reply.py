"""What a chat gives to a front end while a reply streams: pieces, and the end with what is to be told. Torch-free."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from localq.chat import prompt as prompts
from localq.errors import LocalqError
from localq.stats import Stats
from localq.text.grammar import Grammar

_REASONS = {
    "context": "the context is full: the reply stops here, and the next message leaves out the oldest turns; "
    "/compact sums them up instead, /clear starts anew",
    "length": "the reply reached its longest allowed length",
    "cancelled": "stopped",
}
MEASURED = "measured"  # how a reply ends of which nothing was said
_ENDED = "the reply ended"
_STOP_STRING = "a stop string ended the reply"
_NO_ANSWER = " while the model was still thinking: there is no answer yet"
_CUT = ", so it is incomplete: it does not keep to {} yet"


@dataclass(frozen=True)
class ReplyPiece:
    """Part of a reply as it streams; `text` may be empty while the prompt is read. `notice`: a line for the user.

    thinking  the text is part of the thought, not of the answer
    """

    text: str
    stats: Stats
    notice: str = ""
    thinking: bool = False


@dataclass(frozen=True)
class Reply:
    """The end of a reply: the whole answer, why it ended, what to tell.

    reason   "stop", "length", "context", "cancelled", or MEASURED
    text     the answer: all pieces that are not thinking
    thought  what the model thought before it: all pieces that are
    unmet    the grammar that the answer does not keep to, because a limit, a stop string or the user cut it
    """

    text: str
    reason: str
    stats: Stats
    notices: tuple[str, ...] = ()
    thought: str = ""
    unmet: Grammar | None = None


class Recap(str):
    """What to tell that has replies in it. parts: texts, each beginning a line, and whether it is a reply."""

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, *parts: tuple[str, bool]) -> Recap:
        """All of it is the text."""
        told = super().__new__(cls, "\n".join(text for text, _ in parts))
        told.parts = parts
        return told


Replies = Generator[ReplyPiece | Reply, None, None]


def notices(
    reason: str, stats: Stats, warned_before: bool, thinking: bool, unmet: Grammar | None = None
) -> tuple[str, ...]:
    """What to tell at the end. `thinking`: its thought was cut. `warned_before`: of a context nearly full."""
    cut = _NO_ANSWER if thinking else "" if unmet is None else _CUT.format(unmet.label)
    ended = _ENDED if thinking else "" if unmet is None else _STOP_STRING
    what = _REASONS.get(reason, ended)
    told = [what + cut] if what else []
    if reason != "context" and stats.context_fill >= prompts.WARNING and not warned_before:
        told.append(prompts.fill_warning(stats.context_used, stats.context_size))
    return tuple(told)


def check_complete(reply: Reply) -> None:
    """Raise LocalqError where an answer was cut short of its grammar: half of a JSON text is none, and a program that
    reads it must see that. Who stopped it knows."""
    if reply.unmet is None or reply.reason == "cancelled":
        return
    by, more = "it was cut", "Allow more with --max-tokens or --ctx."
    if reply.reason == "stop":
        by, more = "a stop string ended it", "Leave the stop string out."
    why = f"{by} after {reply.stats.generated_tokens} tokens, so it does not keep to {reply.unmet.label}"
    raise LocalqError("the reply", why, more)
