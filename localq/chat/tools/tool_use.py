"""`ToolUse`: what the model of a session may call, and the calls of a reply: checked, asked for, run, recorded.

Every call ends in a result that the model reads: what the tool returned, an error, or that the user did not allow it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localq.chat.history.conversation import Conversation
from localq.chat.history.tool_rounds import CallRecord
from localq.chat.partial_answer import PartialAnswer
from localq.chat.prompt import PromptBuilder
from localq.chat.reply import TOOL_ROUNDS, CallEvent, Reply, ReplyPiece
from localq.chat.tools import results
from localq.chat.tools.arguments import mismatch
from localq.chat.tools.permissions import Decision, OfferedTool, Permission, shown_call
from localq.chat.tools.results import ToolResult
from localq.stats import Stats
from localq.text.tools.declaration import ToolCall
from localq.text.tools.stream import ToolStream

if TYPE_CHECKING:  # start-up cost: most chats have no servers
    from localq.chat.tools.toolbox import Toolbox

LEAST_SHARE = 8  # results of a round may take half of this share of the context, however full it is
REFUSED = "the user did not allow this call"
NEVER = "the user does not allow this tool"
STOPPED = "stopped by the user"
NOBODY = "not allowed: without a terminal, the user cannot be asked"
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
        first = conversation.call_count() + sum(len(each.calls) for each in answer.rounds)
        stats = end.stats
        # Half of what is left of the context; where that is little, older exchanges are left out of the next prompt.
        room = max(stats.context_size - stats.context_used, stats.context_size // LEAST_SHARE) // 2
        records = []
        for number, call in enumerate(end.calls, first):
            run = _CallRun(self.toolbox, self.toolbox.find(call.name), call, is_stopped)
            yield ReplyPiece("", end.stats, event=run.begin())
            result = run.result().fit(max(1, room // len(end.calls)), count)
            records.append(run.record(number, result))
            yield ReplyPiece("", end.stats, event=run.end(result))
        yield ReplyPiece("", end.stats, round=answer.end_round(records))
        return "cancelled" if is_stopped() else ""


@dataclass(frozen=True)
class _CallRun:
    """One call. tool: None for an unknown one."""

    toolbox: Toolbox
    tool: OfferedTool | None
    call: ToolCall
    is_stopped: Callable[[], bool]

    @functools.cached_property
    def wrong(self) -> str:
        """Reason the call cannot run, whatever the user allows; empty if it can."""
        if self.tool is None:
            known = ", ".join(each.label for each in self.toolbox.tools) or "none"
            return f"no such tool: {self.call.name!r}; available tools: {known}"
        why = mismatch(self.call.arguments, self.tool.schema)
        return f"invalid arguments: {why}" if why else ""

    @property
    def server(self) -> str:
        """The name of the server; empty for an unknown tool."""
        return "" if self.tool is None else self.tool.server

    @property
    def permission(self) -> Permission:
        """The permissions of all tools."""
        return Permission.NEVER if self.tool is None else self.toolbox.permission(self.tool)

    def begin(self) -> CallEvent:
        """The event before the call."""
        asks = not self.wrong and self.permission is Permission.ASK and self.toolbox.asker is not None
        return CallEvent(self.call.name, shown_call(self.call.name, self.call.arguments, self.server), asks)

    def end(self, result: ToolResult) -> CallEvent:
        """The event after the call."""
        return dataclasses.replace(self.begin(), asks=False, outcome=result.summary, failed=result.failed)

    def record(self, number: int, result: ToolResult) -> CallRecord:
        """The call as it is kept. number: of the call in the conversation."""
        id = f"call{number % 100_000:05d}"
        return CallRecord(id, self.call.name, self.call.arguments, self.server, result.for_model, result.failed)

    def result(self) -> ToolResult:
        """Run the call, if the user allows it."""
        if self.tool is None or self.wrong or self.is_stopped():
            return results.error(self.wrong or STOPPED)
        if refusal := self._refusal(self.tool):
            return results.error(refusal)
        return self.toolbox.call(self.tool, self.call.arguments, self.is_stopped) or results.error(STOPPED)

    def _refusal(self, tool: OfferedTool) -> str:
        """Return why the call is not allowed, asking the user if needed; empty if it is."""
        if self.permission is not Permission.ASK:
            return NEVER if self.permission is Permission.NEVER else ""
        decision = self.toolbox.ask(tool, self.call.arguments, self.is_stopped)
        refusals = {
            None: f"{NOBODY} (to allow it, use --mcp-allow {tool.label})",
            Decision.REFUSE: REFUSED, Decision.NEVER: NEVER, Decision.STOP: STOPPED,
        }  # fmt: skip
        return refusals.get(decision, "")
