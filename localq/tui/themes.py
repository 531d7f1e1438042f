"""The palette, and the list of themes in it: the chosen one is taken at once, and kept in config.toml."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import CommandPalette
from textual.theme import ThemeProvider

from localq import settings, settings_file
from localq.errors import LocalqError
from localq.sanitize import sanitize
from localq.tui.terminal_app import TerminalScreen

if TYPE_CHECKING:
    from localq.tui.app import LocalqApp


class KeptThemes(ThemeProvider):
    """Textual's search, over the themes that the settings know."""

    @property
    def commands(self) -> list[tuple[str, Callable[[], None]]]:
        """Names, and what choosing them does."""
        app = cast("LocalqApp", self.app)
        return [(name, partial(keep, app, name)) for name in sorted(settings.CHOICES["theme"])]


class Palette(TerminalScreen, CommandPalette):
    """Search and do one."""


class ThemePalette(TerminalScreen, CommandPalette):
    """Search and choose one."""

    def __init__(self) -> None:
        super().__init__(providers=[KeptThemes], placeholder="Look for a theme")


def keep(app: LocalqApp, name: str) -> None:
    """Take it; a config.toml that cannot be written is told, and the theme lasts until the end then."""
    app.settings = app.settings.replace(theme=name)
    app.theme = name
    try:
        settings_file.write("theme", name)
    except LocalqError as error:
        app.notify(sanitize(str(error)), severity="error", markup=False)
