"""Help: every key as it is set, and every command; made from the keys and the commands themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localq import keymap
from localq.chat import commands
from localq.tui.keys import key_labels
from localq.tui.terminal.terminal_app import TerminalScreen

WHERE = {
    keymap.ANYWHERE: "Anywhere", keymap.MESSAGE: "In the message", keymap.CONVERSATION: "In the conversation",
    keymap.SIDEBAR: "In the list of conversations", keymap.PICKER: "In the list of models",
    keymap.QUESTION: "In its questions", keymap.DETAILS: "In the details of a model",
    keymap.OPENING: "While a model is opened or fetched", keymap.SETTINGS: "In the settings",
    keymap.INSTRUMENTS: "In the instruments",
}  # fmt: skip


def key_rows(chosen: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """(where, keys, what they do, name in `[keys]`), in the order of `keymap.KEYS`."""
    return [(WHERE[key.where], key_labels(key), key.what, name) for name, key in keymap.bindings(chosen).items()]


def page(chosen: Mapping[str, str]) -> Group:
    """The whole page."""
    parts: list[RenderableType] = []
    for where in WHERE.values():
        grid = Table.grid(padding=(0, 2, 0, 0))
        for place, keys, what, name in key_rows(chosen):
            if place == where:
                grid.add_row(Text(f"  {keys}"), Text(what), Text(name, "dim"))
        parts += [Text(where, "bold"), grid, Text()]
    parts.append(Text('The last column is the name of a key in the settings, such as keys = "send=ctrl+s".\n'))
    return Group(*parts, Text("Commands", "bold"), Text("\n".join(f"  {line}" for line in commands.HELP.split("\n"))))


class HelpScreen(TerminalScreen, ModalScreen[None]):
    """Over what is there; Esc goes back."""

    AUTO_FOCUS = "#help"  # keys scroll it
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q,ctrl+c", "leave", "Back", show=False)]

    def __init__(self, chosen: Mapping[str, str]) -> None:
        """chosen: the keys of the settings."""
        super().__init__()
        self._chosen = chosen

    def compose(self) -> ComposeResult:
        """Scrolls with the usual keys."""
        with VerticalScroll(id="help"):
            yield Static(page(self._chosen))

    def action_leave(self) -> None:
        """Back."""
        self.dismiss(None)
