"""No control character of a text reaches the terminal, whatever a widget does with it."""

from __future__ import annotations

import asyncio

import pytest
from rich.segment import Segment
from textual.app import App, ComposeResult
from textual.color import Color
from textual.widgets import Input, Label, Static

from localq.sanitize import sanitize
from localq.tui.terminal.sanitized_lines import SANITIZE_LINES
from tests.support.cli.hostile_sequences import ACTING

BLACK = Color(0, 0, 0)


@pytest.mark.parametrize("payload", ACTING.values(), ids=ACTING)
def test_texts_are_made_harmless_and_lines_stay_lines(payload):
    (clean,) = SANITIZE_LINES.apply([Segment(f"a\tb\n{payload}語")], BLACK)
    assert clean.text == "ab" + sanitize(payload).replace("\n", "").replace("\t", "") + "語"


def test_what_is_harmless_stays_the_same_object_and_the_renderers_own_codes_stay():
    segments = [Segment("plain 語"), Segment("\x1b[1;1H", None, [(1,)])]
    assert all(one is other for one, other in zip(SANITIZE_LINES.apply(segments, BLACK), segments, strict=True))


class Widgets(App[None]):
    """Those that show text of their own accord; with and without the filter."""

    def __init__(self, text: str, clean: bool) -> None:
        super().__init__()
        self.text, self.clean = text, clean

    def get_line_filters(self):
        return [*super().get_line_filters(), *([SANITIZE_LINES] if self.clean else [])]

    def compose(self) -> ComposeResult:
        yield Static(self.text, markup=False)
        yield Label(self.text, markup=False)
        yield Input(self.text)

    async def drawn(self) -> str:
        async with self.run_test(size=(80, 10)) as pilot:
            self.notify(self.text, title=self.text, markup=False)
            await pilot.pause()
            return "".join(segment.text for strip in self.screen._compositor.render_strips() for segment in strip)


def test_widgets_draw_nothing_that_acts_and_would_without():
    text = " ".join(ACTING.values())
    assert sanitize(drawn := asyncio.run(Widgets(text, clean=True).drawn())) == drawn
    assert sanitize(drawn := asyncio.run(Widgets(text, clean=False).drawn())) != drawn
