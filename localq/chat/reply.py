"""A reply as a front end receives it: `ReplyPiece`s while it streams, then one `Reply` with notices."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from localq.chat.prompt import WARNING, fill_warning
from localq.errors import LocalqError
from localq.stats import Stats
from localq.text.grammar import Grammar

_REASONS = {
    "context": "stopped: the context is full. The next prompt leaves out the oldest turns; /compact replaces them with "
    "a summary, /clear starts over",
    "length": "stopped at the limit of {tokens} tokens (max_tokens)",
    "cancelled": "stopped",
}
MEASURED = "measured"  # reason of a measurement, which has no text
_ENDED = "the reply ended"
_STOP_STRING = "stopped at a stop string"
_NO_ANSWER = " while the model was thinking; there is no answer yet"
_CUT = "; the answer is incomplete and does not match {}"


@dataclass(frozen=True)
class ReplyPiece:
    """Part of a reply as it streams; `text` is empty during prefill. notice: a line for the user.

    thinking  the text is part of the thought, not of the answer
    """

    text: str
    stats: Stats
    notice: str = ""
    thinking: bool = False


@dataclass(frozen=True)
class Reply:
    """The end of a reply: the whole answer, why it ended, notices.

    reason   "stop", "length", "context", "cancelled", or MEASURED
    text     the answer: all pieces that are not thinking
    thought  all pieces that are
    unmet    grammar that the answer does not match because a limit, a stop string or the user cut it
    """

    text: str
    reason: str
    stats: Stats
    notices: tuple[str, ...] = ()
    thought: str = ""
    unmet: Grammar | None = None


class Recap(str):
    """A notice that contains replies. parts: texts, each on lines of its own, and whether it is a reply."""

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, *parts: tuple[str, bool]) -> Recap:
        """The string is all parts, joined by line ends."""
        joined = super().__new__(cls, "\n".join(text for text, _ in parts))
        joined.parts = parts
        return joined


Replies = Generator[ReplyPiece | Reply, None, None]


def notices(
    reason: str, stats: Stats, warned_before: bool, thinking: bool, unmet: Grammar | None = None
) -> tuple[str, ...]:
    """Notices at the end of a reply. thinking: it ended in a thought. warned_before: of a context nearly full."""
    cut = _NO_ANSWER if thinking else "" if unmet is None else _CUT.format(unmet.label)
    ended = _ENDED if thinking else "" if unmet is None else _STOP_STRING
    what = _REASONS.get(reason, ended).format(tokens=stats.generated_tokens)
    found = [what + cut] if what else []
    if reason != "context" and stats.context_fill >= WARNING and not warned_before:
        found.append(fill_warning(stats.context_used, stats.context_size))
    return tuple(found)


def check_complete(reply: Reply) -> None:
    """Raise LocalqError for an answer that was cut short of its grammar, unless the user stopped it.

    A program that reads half of a JSON text must see that it is not whole.
    """
    if reply.unmet is None or reply.reason == "cancelled":
        return
    by, more = "cut", "Allow more tokens: --max-tokens or --ctx."
    if reply.reason == "stop":
        by, more = "stopped at a stop string", "Remove the stop string."
    why = f"{by} after {reply.stats.generated_tokens} tokens; the answer does not match {reply.unmet.label}"
    raise LocalqError("the reply", why, more)
