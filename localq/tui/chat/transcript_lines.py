"""Lines between turns: notices, and the placeholder of earlier turns."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from localq.sanitize import sanitize
from localq.tui.chat.turn_view import truncate


class EarlierTurns(Static, can_focus=True):
    """Placeholder of the turns that are not drawn."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "show", "show them", show=False)]

    class Requested(Message):
        """Draw earlier turns."""

    def count(self, turns: int) -> None:
        """Set the number of turns that are not drawn."""
        self.display = turns > 0
        self.update(Content(f"▲ {turns} earlier turns (Enter or click to show)"))

    def action_show(self) -> None:
        """Request earlier turns."""
        self.post_message(self.Requested())

    def on_click(self) -> None:
        """Same as Enter."""
        self.action_show()


class Notice(Static):
    """A notice of the program."""

    def __init__(self, text: str, failed: bool = False) -> None:
        shown = truncate(sanitize(text))
        super().__init__(Content(("✗ " if failed else "· ") + shown), classes="failed" if failed else "")
