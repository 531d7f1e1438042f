"""The question before a large download in the full screen: at the start, for another model, and its answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from localq.chat.open_options import Opening, OpenOptions
from localq.errors import LocalqError
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.jobs.thread_messages import StoppedError
from localq.tui.models.opening_screen import OpeningScreen
from localq.tui.models.picker import PickerScreen
from localq.tui.models.picker_dialogs import ConsentScreen
from tests.support.files.fake_hub import FakeHub
from tests.support.tui.opening_host import Host
from tests.support.tui.picker_host import few_models
from tests.support.tui.tui_pilot import drive, screen_text, until

WHY = "There are no models on this machine yet. The best model for this CPU is smollm3-3b (bf16)."


@pytest.fixture(autouse=True)
def server(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    """An empty disk, and a hub that has none of the models."""
    with few_models(tmp_path, monkeypatch) as server:
        yield server


def test_no_is_the_answer_of_enter_and_leads_to_the_list(server):
    app = LocalqApp(Settings(model="smollm3-3b"), wanted=OpenOptions(why=WHY))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: isinstance(app.screen, ConsentScreen) and "6.2 GB" in screen_text(app))
        shown = " ".join(screen_text(app).replace("│", " ").split())
        assert "smollm3-3b: download 6.2 GB?" in shown
        assert WHY in shown
        assert "at 100 Mbit/s" in shown
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))

    drive(app, script, size=(100, 30))
    assert server.requests == []


def test_yes_starts_the_download(server):
    app = LocalqApp(Settings(model="smollm3-3b"), wanted=OpenOptions(why=WHY))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: isinstance(app.screen, ConsentScreen))
        await pilot.press("y")
        await until(pilot, lambda: app.error is not None)  # this hub does not have it

    drive(app, script, size=(100, 30))
    assert server.requests


def test_the_model_is_chosen_after_the_first_frame_then_asked_about():
    chosen = Opening(Settings(model="smollm3-3b"), OpenOptions(why=WHY), "because")
    app = LocalqApp(Settings(), choose=lambda: chosen, pick=True)

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: isinstance(app.screen, ConsentScreen))
        assert app.settings.model == "smollm3-3b"
        assert "because" in [str(each.render()).strip("· ") for each in app.chat.query("Notice")]
        await pilot.press("n")
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))

    drive(app, script, size=(100, 30))


def test_where_none_is_chosen_the_list_is_shown():
    app = LocalqApp(Settings(), choose=lambda: Opening(Settings(), OpenOptions()), pick=True)

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: isinstance(app.screen, PickerScreen) and "smollm3-3b" in screen_text(app))

    drive(app, script, size=(100, 30))


def test_a_failed_choice_is_shown():
    def fail() -> Opening:
        raise LocalqError("models.toml", "cannot be read", "Install localq again.")

    app = LocalqApp(Settings(), choose=fail, pick=True)

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: isinstance(app.screen, PickerScreen) and "smollm3-3b" in screen_text(app))
        notices = [str(each.render()) for each in app.chat.query("Notice")]
        assert any("cannot be read" in each for each in notices), notices

    drive(app, script, size=(100, 30))


@pytest.mark.parametrize(("key", "asked_hub"), [("y", True), ("n", False)])
def test_another_model_is_asked_about_on_its_screen(server, key, asked_hub):
    host = Host(OpeningScreen("smollm3-3b", Settings(), OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: isinstance(host.screen, ConsentScreen))
        await pilot.press(key)
        if asked_hub:
            await until(pilot, lambda: "Try again" in screen_text(host))
        else:
            await until(pilot, lambda: host.results)

    drive(host, script)
    assert bool(server.requests) is asked_hub
    if not asked_hub:
        assert isinstance(host.results[0], StoppedError)
        assert isinstance(host.results[0], LocalqError)


@pytest.mark.parametrize("by_mouse", [False, True])
def test_the_built_in_model_is_an_answer_where_none_was_named(server, monkeypatch, by_mouse):
    app, opened = LocalqApp(Settings(model="smollm3-3b"), wanted=OpenOptions("bf16", why=WHY)), []

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Use smollm2-135m (b)" in screen_text(app))
        monkeypatch.setattr(app, "open", lambda name, wanted: opened.append((name, wanted)))
        await (pilot.click("#other") if by_mouse else pilot.press("b"))
        await until(pilot, lambda: opened)

    drive(app, script, size=(80, 24))
    assert opened == [("smollm2-135m", OpenOptions())]
    assert app.settings.model == "smollm2-135m"
    assert server.requests == []


def test_the_built_in_model_is_no_answer_for_a_model_that_the_user_has_named():
    host = Host(OpeningScreen("smollm3-3b", Settings(), OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Start (y)" in screen_text(host))
        assert "(b)" not in screen_text(host)
        await pilot.press("b")
        await pilot.pause()
        assert isinstance(host.screen, ConsentScreen)

    drive(host, script)
