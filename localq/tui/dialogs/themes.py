"""The command palette, and the list of themes; the chosen theme is applied and saved to config.toml."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from textual.command import CommandPalette, Hit, Hits, Provider, SearchIcon
from textual.errors import NoWidget
from textual.events import Click
from textual.theme import ThemeProvider

from localq import settings, settings_file
from localq.errors import LocalqError
from localq.sanitize import sanitize
from localq.tui.dialogs import palette_lines
from localq.tui.dialogs.palette_lines import PaletteEntry
from localq.tui.jobs.chat_app import ChatApp
from localq.tui.terminal.terminal_app import TerminalScreen

WIDTH, PADDING = 110, 2  # cells of the palette, and on either side of a line; the scrollbar takes one more


class ThemeChoices(ThemeProvider):
    """Search over the themes of the settings."""

    @property
    def commands(self) -> list[tuple[str, Callable[[], None]]]:
        """Theme names with their actions."""
        app = cast("ChatApp", self.app)
        return [(name, partial(set_theme, app, name)) for name in sorted(settings.CHOICES["theme"])]


class _Searched(TerminalScreen, CommandPalette):
    DEFAULT_CSS = f"""
    _Searched > Vertical {{
        margin-top: 1;
        width: {WIDTH};
        max-width: 100%;
    }}
    _Searched #--input {{
        height: 3;
        border: round $primary;
    }}
    _Searched SearchIcon {{
        color: $text-accent;
        margin-top: 0;
    }}
    _Searched CommandInput, _Searched CommandInput:focus {{
        border: none;
    }}
    _Searched CommandList {{
        border: none;
        max-height: 80vh;
        scrollbar-size-vertical: 1;
    }}
    _Searched CommandList > .option-list--option {{
        text-style: none;
    }}
    """

    def on_mount(self) -> None:
        """A mark that every terminal has."""
        super().on_mount()
        self.query_one(SearchIcon).icon = ">"
        self.query_one("#--input").border_title = "Enter choose, Esc back"

    def _on_click(self, event: Click) -> None:  # type: ignore[override]  # as in Textual's
        try:
            self.get_widget_at(event.screen_x, event.screen_y)
        except NoWidget:  # outside, after the terminal became smaller
            event.prevent_default()


class Actions(Provider):
    """Search over the entries of the palette, each one line with its command and key."""

    @property
    def _width(self) -> int:
        return max(1, min(WIDTH, self.app.size.width) - 2 * PADDING - 1)

    def _entries(self) -> list[PaletteEntry]:
        return palette_lines.entries(cast("ChatApp", self.app), self.screen)

    async def discover(self) -> Hits:
        """All entries, in their order."""
        for place, each in enumerate(self._entries()):
            yield Hit(-float(place), each.line(self._width), each.run, each.title)

    async def search(self, query: str) -> Hits:
        """Entries that match; of titles the matching letters are marked."""
        matcher = self.matcher(query)
        for each in self._entries():
            if (score := matcher.match(each.text)) > 0:
                yield Hit(score, each.line(self._width, matcher.highlight(each.title)), each.run, each.title)


class Palette(_Searched):
    """The command palette."""

    def __init__(self) -> None:
        super().__init__(providers=[Actions], placeholder="Search actions and commands")


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
