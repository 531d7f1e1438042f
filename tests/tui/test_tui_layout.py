"""The helper that looks for what overlaps, leaves its place, or is cut: it finds each of these, and nothing more."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Static

from tests.support.tui.tui_layout import problems
from tests.support.tui.tui_pilot import drive

LONG = "word " * 40


class Laid(App[Any]):
    def __init__(self, css: str, parent: Widget) -> None:
        super().__init__()
        self.stylesheet.add_source(css)
        self.inside = parent

    def compose(self) -> ComposeResult:
        yield self.inside


def found(css: str, parent: Widget) -> list[str]:
    app, told = Laid(css, parent), list[str]()

    async def script(pilot: Pilot[Any]) -> None:
        await pilot.pause()
        told.extend(problems(app.screen))

    drive(app, script, size=(40, 12))
    return told


@pytest.mark.parametrize(
    ("css", "word"),
    [
        ("#one { height: auto; }", ""),
        ("#one { height: 1; }", "shows 1 of"),
        ("#one { width: 60; height: auto; }", "leaves"),
        ("#one { height: auto; } #two { offset-y: -1; }", "overlaps"),
        ("#one { height: auto; } #two { height: 20; }", "leaves"),
        ("#one { height: auto; } #two { height: 0; }", "no room"),
    ],
)
def test_each_is_found(css, word):
    told = found(css, Vertical(Static(LONG, id="one"), Static("short", id="two")))
    assert told == [] if not word else word in told[0]


def test_what_scrolls_reaches_further_than_its_place():
    css = "#one { height: 30; } #two { height: auto; }"
    assert found(css, VerticalScroll(Static("a", id="one"), Static("b", id="two"))) == []
