"""What our app adds to Textual's at a terminal: how it is read, what reaches it, its sizes, lists of no height."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from textual.actions import ActionParseResult
from textual.app import App
from textual.command import CommandPalette
from textual.dom import DOMNode
from textual.driver import Driver
from textual.events import Resize
from textual.filter import LineFilter
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import OptionList

from localq.tui.clean_lines import CLEAN_LINES


class NewestSize(Screen[Any]):
    """Lays itself out for the size that the terminal has now, whatever an event says.

    Of two events of different sizes that wait, Textual answers each by one more like it, without end (8.2,
    `Screen._refresh_layout`).
    """

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)


class TerminalApp(App[int]):
    """An app that returns an exit code."""

    def get_driver_class(self) -> type[Driver]:
        """Textual's, but for how a terminal is read."""
        from textual.drivers.linux_driver import LinuxDriver  # where there is one

        from localq.tui.terminal_input import TerminalDriver

        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's, and the one that lets no control character through."""
        return [*super().get_line_filters(), CLEAN_LINES]

    def get_default_screen(self) -> Screen[Any]:
        """The one below all others."""
        return NewestSize(id="_default")

    def on_resize(self, event: Resize) -> None:
        """A terminal that was small for a moment has cut off what it showed; Textual draws where the size is new."""
        if self.screen.size == event.size:
            self.refresh()

    async def run_action(
        self, action: str | ActionParseResult, default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:  # fmt: skip
        """Textual's; but a list that has no height knows no place of its lines, which is no reason to end."""
        try:
            return await super().run_action(action, default_namespace, namespaces)
        except KeyError:
            if not isinstance(default_namespace, CommandPalette | OptionList):
                raise
            return False
