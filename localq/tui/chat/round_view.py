"""A part of a reply that ended in tool calls: thought, text, and a chip for each call with its result."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Collapsible, Static

from localq.chat.history.tool_rounds import CallRecord, ToolRound
from localq.sanitize import sanitize
from localq.text import thinking
from localq.tui.chat.attachment_chips import Chip


class RoundView(Vertical):
    """One round of a reply."""

    DEFAULT_CSS = "RoundView { height: auto; }"

    def __init__(self, round: ToolRound, folded: bool = True) -> None:
        super().__init__()
        self._round, self._is_folded = round, folded

    def compose(self) -> ComposeResult:
        """The thought, the text and the calls."""
        from localq.tui.reply.reply_text import ReplyText  # start-up cost: it imports Markdown

        thought, answer = (sanitize(each) for each in thinking.split_reply(self._round.content))
        if thought:
            shown = Static(Content(thought), classes="thought")
            title = f"thought ({len(thought.split())} words)"
            yield Collapsible(shown, title=title, collapsed=self._is_folded)
        if answer:
            yield ReplyText(answer)
        for call in self._round.calls:
            yield Chip(call_title(call), f"{call.arguments}\n\n{call.result}")


def call_title(call: CallRecord) -> str:
    """The line of a call: a mark, server, tool and arguments."""
    return f"{'✗' if call.failed else '✓'} {call.line}"
