"""A reply as a front end receives it: `ReplyPiece`s while it streams, then one `Reply` with notices."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from localq.chat.history.tool_rounds import ToolRound
from localq.chat.prompt import WARNING, fill_warning
from localq.chat.reply_limits import ANSWER_TOKENS, DEFAULT_LENGTH, REPETITION, Cycle
from localq.errors import LocalqError
from localq.stats import Stats
from localq.text.grammar import Grammar
from localq.text.tools.declaration import ToolCall

MEASURED = "measured"  # reason of a measurement, which has no text
TOOL_ROUNDS = "tool_rounds"  # reason of a reply that calls tools again and again
_REASONS = {
    "context": "stopped: the context is full. The next prompt will leave out the oldest turns; /compact replaces them "
    "with a summary, and /clear starts over",
    "length": "stopped at the limit of {tokens} tokens (max_tokens)",
    DEFAULT_LENGTH: f"stopped at the default limit of {ANSWER_TOKENS:,} tokens",
    REPETITION: "stopped: the last {period} tokens were repeated {blocks} times",
    "cancelled": "stopped",
    TOOL_ROUNDS: "stopped after {rounds} rounds of tool calls (mcp_rounds)",
}
_ADVICE = {  # reason -> in a chat, elsewhere
    "length": ("; /continue resumes", ""),
    DEFAULT_LENGTH: (
        "; /continue resumes, and /set max_tokens changes the limit",
        "; change it with -n TOKENS or -n max",
    ),
    REPETITION: (
        "; /continue resumes, and /set loop_guard off disables this check",
        "; --no-loop-guard disables this check",
    ),
    TOOL_ROUNDS: ("; to let the model call more tools, use /continue", ""),
}
_ENDED = "the reply ended"
_STOP_STRING = "stopped at a stop string"
_NO_ANSWER = " while the model was thinking; there is no answer yet"
_THOUGHT_STOPPED = "thinking stopped at the limit of {} tokens (think_budget)"
_CUT = "; the answer is incomplete and does not match {}"


@dataclass(frozen=True)
class CallEvent:
    """A tool call of a reply, before it runs and after. tool: its name; line: server, tool and arguments, for the user.

    asks     before: the user is asked about it, and sees all of it there
    outcome  after: size of the result, or why there is none
    failed   the call has no result
    """

    tool: str
    line: str
    asks: bool = False
    outcome: str = ""
    failed: bool = False


@dataclass(frozen=True)
class ReplyPiece:
    """Part of a reply as it streams; `text` is empty during prefill. notice: a line for the user.

    thinking  the text is part of the thought, not of the answer
    calls     tool calls that have become whole
    event     a tool call begins or ends
    round     the text so far has ended in these calls; what follows is another part of the reply
    """

    text: str
    stats: Stats
    notice: str = ""
    thinking: bool = False
    calls: tuple[ToolCall, ...] = ()
    event: CallEvent | None = None
    round: ToolRound | None = None


@dataclass(frozen=True)
class Reply:
    """The end of a reply: the whole answer, why it ended, notices.

    reason   "stop", "length", DEFAULT_LENGTH, "context", REPETITION, "cancelled", TOOL_ROUNDS, or MEASURED
    text     the answer: all pieces that are not thinking
    thought  all pieces that are
    unmet    grammar that the answer does not match because a limit, a stop string or the user cut it
    calls    tool calls, in their order; empty where no tools were offered
    """

    text: str
    reason: str
    stats: Stats
    notices: tuple[str, ...] = ()
    thought: str = ""
    unmet: Grammar | None = None
    calls: tuple[ToolCall, ...] = ()

    @property
    def thought_stopped(self) -> bool:
        """True if the thought was ended at its budget (`think_budget`)."""
        return self.stats.forced_tokens > 0


class Recap(str):
    """A notice that contains replies. parts: texts, each on lines of its own, and whether it is a reply."""

    parts: tuple[tuple[str, bool], ...]

    def __new__(cls, *parts: tuple[str, bool]) -> Recap:
        """The string is all parts, joined by line ends."""
        joined = super().__new__(cls, "\n".join(text for text, _ in parts))
        joined.parts = parts
        return joined


Replies = Generator[ReplyPiece | Reply, None, None]


@dataclass(frozen=True)
class Ending:
    """The end of a reply and its reason. thinking: in a thought. cycle: what repeats. think_budget: as requested.

    rounds    of tool calls, if these ended it
    in_chat   notices may name commands of a chat
    """

    reason: str
    stats: Stats
    thinking: bool = False
    unmet: Grammar | None = None
    cycle: Cycle | None = None
    in_chat: bool = True
    think_budget: int | None = None
    rounds: int = 0


def notices(ending: Ending, warned_before: bool) -> tuple[str, ...]:
    """Notices at the end of a reply. warned_before: of a context nearly full."""
    cut = _NO_ANSWER if ending.thinking else "" if ending.unmet is None else _CUT.format(ending.unmet.label)
    otherwise = _ENDED if ending.thinking else "" if ending.unmet is None else _STOP_STRING
    cycle, what = ending.cycle or Cycle(1, 1), _REASONS.get(ending.reason, otherwise)
    facts = {"tokens": ending.stats.generated_tokens, "period": cycle.period, "blocks": cycle.blocks}
    what = what.format(**facts, rounds=ending.rounds)
    advice = _ADVICE.get(ending.reason, ("", ""))[0 if ending.in_chat else 1]
    stats = ending.stats
    found = [_THOUGHT_STOPPED.format(ending.think_budget)] if stats.forced_tokens else []
    found += [what + cut + advice] if what else []
    if ending.reason != "context" and stats.context_fill >= WARNING and not warned_before:
        found.append(fill_warning(stats.context_used, stats.context_size, ending.in_chat))
    return tuple(found)


def check_complete(reply: Reply) -> None:
    """Raise LocalqError for an answer that was cut short of its grammar, unless the user stopped it.

    A program that reads half of a JSON text must see that it is not whole.
    """
    if reply.unmet is None or reply.reason == "cancelled":
        return
    by, more = "cut", "Raise --max-tokens or --ctx."
    if reply.reason == REPETITION:
        by, more = "stopped because of repetition", "Change the prompt, or use --no-loop-guard."
    if reply.reason == "stop":
        by, more = "stopped at a stop string", "Remove the stop string."
    why = f"{by} after {reply.stats.generated_tokens} tokens; the answer does not match {reply.unmet.label}"
    raise LocalqError("the reply", why, more)
