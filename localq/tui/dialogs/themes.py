"""The command palette, and the list of themes; the chosen theme is applied and saved to config.toml."""

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
    """Search over the themes of the settings."""

    @property
    def commands(self) -> list[tuple[str, Callable[[], None]]]:
        """Theme names with their actions."""
        app = cast("ChatApp", self.app)
        return [(name, partial(set_theme, app, name)) for name in sorted(settings.CHOICES["theme"])]


class _Searched(TerminalScreen, CommandPalette):
    def _on_click(self, event: Click) -> None:  # type: ignore[override]  # as in Textual's
        try:
            self.get_widget_at(event.screen_x, event.screen_y)
        except NoWidget:  # outside, after the terminal became smaller
            event.prevent_default()


class Palette(_Searched):
    """The command palette."""


class ThemePalette(_Searched):
    """The list of themes."""

    def __init__(self) -> None:
        super().__init__(providers=[ThemeChoices], placeholder="Search themes")


def set_theme(app: ChatApp, name: str) -> None:
    """Apply and save a theme; if config.toml cannot be written, show the error and use it until the app ends."""
    app.settings = app.settings.replace(theme=name)
    app.theme = name
    try:
        settings_file.write("theme", name)
    except LocalqError as error:
        app.notify(sanitize(str(error)), severity="error", markup=False)
