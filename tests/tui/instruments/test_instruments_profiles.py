"""When the instruments ask for a profile of a step."""

from __future__ import annotations

import pytest

from localq.stats import Stats
from localq.tui.instruments.instrument_panel import InstrumentPanel, InstrumentsScreen
from tests.support.tui.instruments_lab import GPU, PROFILE, chatting, reply, run, settle
from tests.support.tui.tui_pilot import screen_text, until

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_profile_is_asked_for_after_a_load_and_again_when_the_context_has_grown():
    async def scene(app, pilot):
        app.panel.show_model(GPU)
        await until(pilot, lambda: app.wanted == 1)
        app.panel._tick()
        app.panel.end_reply()
        await pilot.pause()
        assert app.wanted == 1  # it was asked, and not answered yet
        app.panel.show_profile(PROFILE)
        app.panel.show_stats(reply(10, used=4000))
        app.panel._tick()
        await pilot.pause()
        assert app.wanted == 1  # not while a reply runs
        app.panel.end_reply()
        await until(pilot, lambda: app.wanted == 2)

    run("side", (40, 50), scene)


def test_the_key_asks_for_one_now_or_behind_the_reply():
    async def scene(app, pilot):
        await chatting(app, pilot)
        before = app.wanted
        app.panel.focus()
        await pilot.press("k")
        await pilot.pause()
        assert app.wanted == before
        app.panel.show_stats(Stats("done", 100, generated_tokens=241, decode_s=3.0, context_used=400))
        app.panel.end_reply()
        await until(pilot, lambda: app.wanted == before + 1)
        app.panel.show_no_profile("no room")
        await pilot.press("k")
        await until(pilot, lambda: app.wanted == before + 2)

    run("side", (40, 50), scene)


def test_its_keys_can_be_set():
    async def scene(app, pilot):
        app.set_keymap({"instruments_profile": "x", "instruments_leave": "z"})
        await chatting(app, pilot)
        app.panel.end_reply()
        await app.push_screen(InstrumentsScreen(app.panel))
        await pilot.press("escape", "q", "k")
        assert isinstance(app.screen, InstrumentsScreen)
        app.screen.query_one(InstrumentPanel).focus()
        before = app.wanted
        await pilot.press("k")
        await pilot.pause()
        assert app.wanted == before
        await pilot.press("x")
        await until(pilot, lambda: app.wanted == before + 1)
        await pilot.press("z")
        assert not isinstance(app.screen, InstrumentsScreen)

    run("side", (40, 50), scene)


def test_what_failed_is_tried_again_behind_the_next_reply():
    async def scene(app, pilot):
        app.panel.show_model(GPU)
        await until(pilot, lambda: app.wanted == 1)
        app.panel.show_no_profile("the model was busy")
        app.panel._tick()
        await pilot.pause()
        assert app.wanted == 1
        app.panel.show_stats(reply(10))
        app.panel.end_reply()
        await until(pilot, lambda: app.wanted == 2)
        await until(pilot, lambda: "the model was busy" in screen_text(app))

    run("side", (40, 50), scene)


def test_a_strip_that_shows_no_profile_asks_for_none():
    async def scene(app, pilot):
        app.panel.show_model(GPU)
        await settle(pilot, app.panel)
        assert app.wanted == 0
        app.panel.mode = "side"
        await until(pilot, lambda: app.wanted == 1)

    run("strip", (100, 30), scene)
