"""Opening on a screen: stages of the load, stopping it, what comes too late, and a bug in the thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from localq.chat import open_model
from localq.chat.open_model import OpenSession
from localq.chat.open_options import OpenOptions
from localq.chat.terminal import error_log
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.jobs.model_jobs import ReadyModel
from localq.tui.jobs.thread_messages import StoppedError
from localq.tui.models.opening_screen import OpeningScreen
from localq.worker.messages import Load, Loaded, Loading
from tests.support.tui.opening_host import SETTINGS, SIZES, Host
from tests.support.tui.tui_layout import assert_sound
from tests.support.tui.tui_pilot import drive, screen_text, until


class SlowClient:
    """An engine that says one stage of its load and then nothing until it is closed or let go on."""

    def __init__(self, says: str = "loading weights") -> None:
        self.closed, self.going, self.says = threading.Event(), threading.Event(), says
        self.alive = True

    def load(self, request: Load, on_event: Any) -> Loaded:
        on_event(Loading(self.says, 3 * 10**6, 12 * 10**6))
        while not self.going.wait(0.01):
            if self.closed.is_set():
                raise LocalqError("engine process", "not running", "The next message starts one.")
        return Loaded(
            request.options.name, "cpu", "test CPU", "float32", "bf16", 100, 256, False, 0.0, notes=["on the CPU"]
        )

    def close(self) -> None:
        self.alive = False
        self.closed.set()


class FakeSession:
    """What `load_now` and `check_converses` need."""

    def __init__(self, client: SlowClient, name: str) -> None:
        self.client, self.name, self.loaded, self.tokenizer = client, name, None, self
        self.chat_template: str | None = "a template"

    def ensure_loaded(self, on_event: Any) -> Loaded:
        self.loaded = self.client.load(Load("path", LoadOptions(self.name)), on_event)
        return self.loaded


@pytest.fixture
def client(monkeypatch) -> SlowClient:
    """Opening "a-model" gives a session on it; "a-base-model" has no template."""
    client = SlowClient()

    @contextlib.contextmanager
    def open_session(
        name: str, settings: Settings, watcher: open_model.Watcher, wanted: OpenOptions
    ) -> Iterator[OpenSession]:
        session = FakeSession(client, name)
        session.chat_template = None if "base" in name else session.chat_template
        watcher.say(f"{name}: the default is too large\x1b[31m")
        try:
            yield OpenSession(session, client)
        finally:
            client.close()

    monkeypatch.setattr(open_model, "open_session", open_session)
    return client


@pytest.mark.parametrize("size", SIZES)
def test_a_load_shows_stages_and_bytes_and_hands_over_what_is_open(client, size):
    host = Host(OpeningScreen("a-model", SETTINGS, OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Loading: loading weights" in screen_text(host))
        await pilot.pause()
        assert "3.0 MB of 12.0 MB" in screen_text(host)
        assert "─  25%" in screen_text(host)
        assert "too large[31m" in str(host.screen.query_one("#notices", Static).content)
        assert_sound(host.screen)
        await pilot.press("enter")  # the second of two where it was chosen
        client.going.set()
        await until(pilot, lambda: host.results)

    drive(host, script, size=size)
    made = host.results[0]
    assert isinstance(made, ReadyModel)
    assert made.loaded.context_size == 100
    assert not client.closed.is_set()  # the end of the app is not the end of what it handed over
    made.close()
    assert client.closed.is_set()


def test_stopping_a_load_ends_the_engine_process(client):
    host = Host(OpeningScreen("a-model", SETTINGS, OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Loading" in screen_text(host))
        await pilot.click("#leave")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert isinstance(host.results[0], StoppedError)
    assert client.closed.is_set()


def test_what_comes_after_it_was_left_is_closed(client):
    client.close = client.going.set  # closing is not what ends this load: it ends well, and too late
    discarded = threading.Event()

    class Screen(OpeningScreen):
        def discard(self, made: ReadyModel) -> None:
            super().discard(made)
            discarded.set()

    host = Host(Screen("a-model", SETTINGS, OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Loading" in screen_text(host))
        await pilot.press("escape")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert isinstance(host.results[0], StoppedError)
    assert discarded.wait(10)


def test_an_app_that_ends_stops_what_goes_on(client):
    host = Host(OpeningScreen("a-model", SETTINGS, OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "Loading" in screen_text(host))
        host.exit()

    drive(host, script)
    assert client.closed.wait(10)


def test_a_base_model_is_refused_before_it_is_loaded(client):
    host = Host(OpeningScreen("a-base-model", SETTINGS, OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: host.first.error)
        assert "no chat template" in screen_text(host)
        await pilot.press("escape")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert client.closed.is_set()


def test_a_bug_in_the_thread_is_shown_with_its_log(client, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(open_model, "load_now", broken)
    host = Host(OpeningScreen("a-model", SETTINGS, OpenOptions()))

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: host.first.error)
        assert client.closed.is_set()
        assert "unexpected error (ZeroDivisionError)" in screen_text(host)
        await pilot.press("escape")
        await until(pilot, lambda: host.results)

    drive(host, script)
    assert "ZeroDivisionError: a bug" in error_log.path().read_text()
