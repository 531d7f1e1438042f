"""An app that shows one screen of opening or fetching, as tests push it."""

from __future__ import annotations

from typing import Any

from textual.app import App

from localq.settings import Settings
from localq.tui.models.opening_screen import JobScreen

SIZES = [(80, 24), (200, 60), (40, 12)]
SETTINGS = Settings(device="cpu")


class Host(App[Any]):
    """Pushes a screen and keeps what it is dismissed with."""

    def __init__(self, screen: JobScreen[Any]) -> None:
        super().__init__()
        self.first, self.results = screen, []

    def on_mount(self) -> None:
        self.push_screen(self.first, self.results.append)
