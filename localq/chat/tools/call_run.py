"""`CallRun`: one call of a tool in a reply: checked, asked for, run, recorded.

Every call ends in a result that the model reads: what the tool returned, an error, or that the user did not allow it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localq.chat.history.tool_rounds import CallRecord
from localq.chat.reply import CallEvent
from localq.chat.tools import results
from localq.chat.tools.arguments import mismatch
from localq.chat.tools.permissions import Decision, OfferedTool, Permission, shown_call
from localq.chat.tools.results import ToolResult
from localq.text.tools.declaration import ToolCall

if TYPE_CHECKING:
    from localq.chat.tools.toolbox import Toolbox

REFUSED = "the user did not allow this call"
NEVER = "the user does not allow this tool"
STOPPED = "stopped by the user"
NOBODY = "not allowed: without a terminal, the user cannot be asked"


@dataclass(frozen=True)
class CallRun:
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
