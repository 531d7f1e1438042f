"""`ToolUse`: what the model of a session may call, and the rounds of calls of a reply (`call_run` has one call).

Every call ends in a result that the model reads: what the tool returned, an error, or that the user did not allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localq.chat.history.conversation import Conversation
from localq.chat.partial_answer import PartialAnswer
from localq.chat.prompt import PromptBuilder
from localq.chat.reply import TOOL_ROUNDS, Reply, ReplyPiece
from localq.stats import Stats

if TYPE_CHECKING:  # start-up cost: most chats have no servers
    from localq.chat.tools.toolbox import Toolbox
    from localq.text.tools.stream import ToolStream

LEAST_SHARE = 8  # results of a round may take half of this share of the context, however full it is
NO_TEMPLATE = "this model's chat template does not support tools, so tools are disabled"
BOUND = "a grammar constrains the answer, so tools are disabled"


@dataclass
class ToolUse:
    """Tools of one session. toolbox None: there are none."""

    toolbox: Toolbox | None = None
    _said: str = ""  # why the model gets no tools, where that is known to the user

    def report(self, reading: PromptBuilder, summary: bool) -> list[str]:
        """Lines about the servers when a chat begins: failures, and with `summary` which tools there are. Waits."""
        return [] if self.toolbox is None else self._prepare(self.toolbox, reading, lambda: False, summary=summary)

    def offer(
        self, reading: PromptBuilder, bound: bool, is_stopped: Callable[[], bool]
    ) -> Generator[ReplyPiece, None, Callable[[], ToolStream] | None]:
        """Declare the tools in prompts; yields notices and returns what makes the parser of calls, if there are tools.

        bound: a grammar constrains the answer
        """
        reading.tools = ()
        if self.toolbox is None:
            return None
        for line in self._prepare(self.toolbox, reading, is_stopped, bound):
            yield ReplyPiece("", Stats(), line)
        form, offered = reading.tool_format, tuple(each.declared for each in self.toolbox.tools)
        if form is None or bound or not offered:
            return None
        reading.tools = offered
        return lambda: form.stream(offered)

    def _prepare(
        self, toolbox: Toolbox, reading: PromptBuilder, is_stopped: Callable[[], bool], bound: bool = False,
        summary: bool = False,
    ) -> list[str]:  # fmt: skip
        toolbox.wait(is_stopped)
        lines = toolbox.take_notices()
        why = NO_TEMPLATE if reading.tool_format is None else BOUND if bound else ""
        if why and why != self._said and toolbox.tools:
            lines.append(why)
        elif summary and toolbox.tools:
            lines.append(f"tools: {toolbox.summary()} (to list them, use /tools)")
        self._said = why
        return lines

    def stop(self) -> None:
        """End the question or the call that waits, from any thread."""
        if self.toolbox is not None:
            self.toolbox.stop()

    def call(
        self, end: Reply, answer: PartialAnswer, conversation: Conversation, is_stopped: Callable[[], bool],
        count: Callable[[str], int],
    ) -> Generator[ReplyPiece, None, str]:  # fmt: skip
        """Run the calls of the reply that has ended, which becomes a round of `answer`. count: tokens of a text.

        Yields events. Returns why the answer ends here: TOOL_ROUNDS (nothing is run), "cancelled", or "": it goes on.
        """
        if self.toolbox is None or answer.made_rounds >= self.toolbox.limits.rounds:
            return TOOL_ROUNDS
        from localq.chat.tools.call_run import CallRun  # start-up cost: most replies make no calls

        first = conversation.call_count() + sum(len(each.calls) for each in answer.rounds)
        stats = end.stats
        # Half of what is left of the context; where that is little, older exchanges are left out of the next prompt.
        room = max(stats.context_size - stats.context_used, stats.context_size // LEAST_SHARE) // 2
        records = []
        for number, call in enumerate(end.calls, first):
            run = CallRun(self.toolbox, self.toolbox.find(call.name), call, is_stopped)
            yield ReplyPiece("", end.stats, event=run.begin())
            result = run.result().fit(max(1, room // len(end.calls)), count)
            records.append(run.record(number, result))
            yield ReplyPiece("", end.stats, event=run.end(result))
        yield ReplyPiece("", end.stats, round=answer.end_round(records))
        return "cancelled" if is_stopped() else ""
