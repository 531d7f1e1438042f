"""Lines between the turns of a conversation: what the program says, and what stands for turns that are not drawn."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from localq.sanitize import sanitize
from localq.tui.chat.turn_view import truncate


class EarlierTurns(Static, can_focus=True):
    """The line in place of the turns that are not drawn."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "show", "show them", show=False)]

    class Requested(Message):
        """They are to be drawn."""

    def count(self, turns: int) -> None:
        """So many are not drawn."""
        self.display = turns > 0
        self.update(Content(f"▲ {turns} earlier turns: Enter or a click shows more"))

    def action_show(self) -> None:
        """Ask for them."""
        self.post_message(self.Requested())

    def on_click(self) -> None:
        """As Enter."""
        self.action_show()


class Notice(Static):
    """A line of the program, not of the conversation."""

    def __init__(self, text: str, failed: bool = False) -> None:
        shown = truncate(sanitize(text))
        super().__init__(Content(("✗ " if failed else "· ") + shown), classes="failed" if failed else "")
