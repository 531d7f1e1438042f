"""The palette, and the list of themes in it: the chosen one is taken at once, and kept in config.toml."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from textual.command import CommandPalette
from textual.errors import NoWidget
from textual.events import Click
from textual.theme import ThemeProvider

from localq import settings, settings_file
from localq.errors import LocalqError
from localq.sanitize import sanitize
from localq.tui.jobs.chat_app import ChatApp
from localq.tui.terminal.terminal_app import TerminalScreen


class ThemeChoices(ThemeProvider):
    """Textual's search, over the themes that the settings know."""

    @property
    def commands(self) -> list[tuple[str, Callable[[], None]]]:
        """Names, and what choosing them does."""
        app = cast("ChatApp", self.app)
        return [(name, partial(set_theme, app, name)) for name in sorted(settings.CHOICES["theme"])]


class _Searched(TerminalScreen, CommandPalette):
    def _on_click(self, event: Click) -> None:  # type: ignore[override]  # as in Textual's
        try:
            self.get_widget_at(event.screen_x, event.screen_y)
        except NoWidget:  # the terminal has become smaller since: there is nothing to click at
            event.prevent_default()


class Palette(_Searched):
    """Search and do one."""


class ThemePalette(_Searched):
    """Search and choose one."""

    def __init__(self) -> None:
        super().__init__(providers=[ThemeChoices], placeholder="Look for a theme")


def set_theme(app: ChatApp, name: str) -> None:
    """Take it; a config.toml that cannot be written is told, and the theme lasts until the end then."""
    app.settings = app.settings.replace(theme=name)
    app.theme = name
    try:
        settings_file.write("theme", name)
    except LocalqError as error:
        app.notify(sanitize(str(error)), severity="error", markup=False)
