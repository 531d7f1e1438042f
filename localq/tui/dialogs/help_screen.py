"""The help screen: all keys as configured, and all commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localq import keymap
from localq.chat import commands
from localq.tui.gauge import rich_style
from localq.tui.keys import key_labels
from localq.tui.terminal.terminal_app import TerminalScreen

WHERE = {
    keymap.ANYWHERE: "Anywhere", keymap.MESSAGE: "Prompt", keymap.CONVERSATION: "Conversation",
    keymap.SIDEBAR: "List of conversations", keymap.PICKER: "List of models",
    keymap.QUESTION: "Confirmations", keymap.DETAILS: "Details of a model",
    keymap.OPENING: "Opening or downloading a model", keymap.SETTINGS: "Settings",
    keymap.INSTRUMENTS: "Instruments",
}  # fmt: skip


def key_rows(chosen: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Rows of (where, keys, action, name in `[keys]`), in the order of `keymap.KEYS`."""
    return [(WHERE[key.where], key_labels(key), key.what, name) for name, key in keymap.bindings(chosen).items()]


def page(chosen: Mapping[str, str], of_heading: Style, of_key: Style) -> Group:
    """The whole help text, headings and keys in these styles."""
    parts: list[RenderableType] = []
    for where in WHERE.values():
        grid = Table.grid(padding=(0, 2, 0, 0))
        for place, keys, what, name in key_rows(chosen):
            if place == where:
                grid.add_row(Text(f"  {keys}", of_key), Text(what), Text(name, "dim"))
        parts += [Text(where, of_heading), grid, Text()]
    parts.append(Text('To rebind a key, use the name in the last column, as in keys = "send=ctrl+s".\n'))
    return Group(
        *parts, Text("Commands", of_heading), Text("\n".join(f"  {line}" for line in commands.HELP.split("\n")))
    )


class HelpScreen(TerminalScreen, ModalScreen[None]):
    """The help, over the current screen; Esc closes it."""

    AUTO_FOCUS = "#help"  # so that keys scroll it
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q,ctrl+c", "leave", "Back", show=False)]

    def __init__(self, chosen: Mapping[str, str]) -> None:
        """chosen: keys set by the user."""
        super().__init__()
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        """The page in a scroll view."""
        with VerticalScroll(id="help") as shown:
            shown.border_title, shown.border_subtitle = "Help", "Esc back"
            yield Static(
                page(self._chosen, rich_style(self.app, "primary", True), rich_style(self.app, "accent", True))
            )

    def action_leave(self) -> None:
        """Close."""
        self.dismiss(None)
