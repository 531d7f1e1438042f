"""The instruments beside a conversation, in the real app over a scripted engine: at the sizes of terminals."""

from __future__ import annotations

import pytest

from localq.errors import LocalqError
from localq.settings import Settings
from localq.tui.instruments import instrument_facts
from localq.tui.instruments.instrument_panel import InstrumentPanel, InstrumentsScreen
from tests.support.tui.instruments_lab import GPU, PROFILE, TimedClient, Watch, chat_app
from tests.support.tui.tui_pilot import drive, screen_text, until


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    for name in ("config", "data", "cache"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.setattr(instrument_facts.InstrumentFacts.__init__, "__defaults__", (lambda: 0.0, Watch()))


def chatting(size, scene, keys=(), profile=lambda: PROFILE):
    """Some keys, a reply, and `scene(app, pilot)`."""
    app = chat_app(TimedClient(GPU), Settings(save=False), profile)

    async def script(pilot):
        await until(pilot, lambda: app.chat.conversation.model is not None)
        await pilot.press(*keys)
        app.chat.conversation.send_message("Hello")
        await until(pilot, lambda: app.chat.instruments.facts.speed.last.generated_tokens == 80)
        await until(pilot, lambda: not app.chat.conversation.busy)
        await scene(app, pilot)

    drive(app, script, size)


@pytest.mark.parametrize(("size", "width"), [((200, 60), 56), ((160, 50), 46), ((120, 40), 40)])
def test_at_the_side(size, width):
    async def scene(app, pilot):
        panel = app.chat.instruments
        assert panel.region.right == size[0]
        assert panel.region.width == width
        assert not panel.region.overlaps(app.chat.conversation.region)
        said = ("500 tok/s", "Decode step", "RTX 3090", "free")
        await until(pilot, lambda: all(text in screen_text(app) for text in said))
        await pilot.press("f2")
        await until(pilot, lambda: not panel.is_visible)
        assert app.chat.conversation.region.right == size[0]

    chatting(size, scene)


@pytest.mark.parametrize("size", [(100, 30), (80, 24)])
def test_as_a_strip_and_over_the_whole_screen(size):
    async def scene(app, pilot):
        panel = app.chat.instruments
        assert (panel.region.height, panel.region.width) == (7, size[0])
        assert not panel.region.overlaps(app.chat.composer.region)
        assert app.chat.composer.region.height >= 1
        await until(pilot, lambda: "500 tok/s" in screen_text(app) and "23.0 of 24.0 GiB" in screen_text(app))
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(app.screen, InstrumentsScreen))
        whole = app.screen.query_one(InstrumentPanel)
        said = ("500 tok/s", "at 1,024 tokens", "host gap", "free")
        await until(pilot, lambda: all(text in screen_text(app) for text in said))
        assert whole.max_scroll_y == 0  # without scrolling
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat)

    chatting(size, scene, keys=["f2"])


def test_f5_times_a_step_anew_beside_the_chat_and_over_the_whole_screen():
    taken = []

    def counted():
        taken.append(PROFILE)
        return PROFILE

    async def scene(app, pilot):
        await until(pilot, lambda: len(taken) == 1)
        await until(pilot, lambda: not app.chat.conversation.busy)
        await pilot.press("f5")
        await until(pilot, lambda: len(taken) == 2)
        await until(pilot, lambda: not app.chat.conversation.busy)
        await pilot.resize_terminal(100, 30)
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(app.screen, InstrumentsScreen))
        await pilot.press("f5")
        await until(pilot, lambda: len(taken) == 3)

    chatting((120, 40), scene, profile=counted)


def test_nothing_of_it_where_it_is_not_asked_for():
    async def scene(app, pilot):
        assert not app.chat.instruments.is_visible
        assert app.chat.instruments.facts.reading.total is None
        assert app.chat.instruments.facts.sample is None

    chatting((80, 24), scene)


def test_a_profile_that_cannot_be_taken_is_told_and_the_chat_goes_on():
    def broken():
        raise LocalqError("profile", "a context of 8 has no room for 20 steps")

    async def scene(app, pilot):
        await until(pilot, lambda: "has no room" in screen_text(app))
        assert not app.chat.conversation.busy

    chatting((120, 40), scene, profile=broken)


@pytest.mark.parametrize("size", [(40, 12), (7, 3), (1, 1)])
def test_no_terminal_is_too_small(size):
    async def scene(app, pilot):
        await pilot.press("f2")
        for width, height in ((200, 60), size, (100, 2), (2, 100), size):
            await pilot.resize_terminal(width, height)
        assert app._exception is None

    chatting(size, scene, keys=["f2"])
