"""Errors that nobody foresaw: the screen shows one line and goes on; a log has the traceback, without locals."""

from __future__ import annotations

import asyncio

import pytest
from rich.traceback import Traceback
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from localq.chat.terminal import error_log
from localq.tui.jobs.job import Job
from localq.tui.terminal import error_guard
from tests.support.tui.tui_pilot import chat_app, drive, drive_chat, idle, say, screen_text, until

TOKEN = "hf_of-the-user-and-nobody-else"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def fail(*given: object) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    raise LookupError(f"no answer to {headers}")


async def fail_later() -> None:
    await asyncio.sleep(0)
    fail()


class Broken(Static):
    """A widget that fails at what is in `fails`."""

    class Asked(Message):
        """A message to the widget."""

    def __init__(self, fails: str) -> None:
        super().__init__("")
        self.fails = fails

    def on_mount(self) -> None:
        if self.fails == "mount":
            fail()

    def render(self) -> str:
        if self.fails.startswith("render"):
            self.fails = self.fails.removeprefix("render")
            fail()
        return "drawn"

    def on_broken_asked(self) -> None:
        fail()

    def on_click(self) -> None:
        fail()


class BrokenScreen(ModalScreen[None]):
    """A screen that fails at what is in `fails`."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    def compose(self) -> ComposeResult:
        if self.fails == "compose":
            fail()
        with Vertical():
            yield Static("a dialog that stays", id="stays")
            yield Button("Press")
            yield Input(id="line")

    def on_mount(self) -> None:
        if self.fails == "mount":
            fail()

    def key_x(self) -> None:
        fail()

    def on_button_pressed(self) -> None:
        fail()

    def on_input_changed(self) -> None:
        fail()


async def _press(pilot, keys):
    await pilot.app.push_screen(BrokenScreen(""))
    pilot.app.screen.query_one(Input if "y" in keys else Button).focus()
    await pilot.press(*keys)
    await pilot.pause()
    assert "a dialog that stays" in screen_text(pilot.app)
    await pilot.app.screen.dismiss(None)


async def _mount(pilot, fails, then=None):
    widget = Broken(fails)
    await pilot.app.chat.mount(widget)
    if then is not None:
        widget.post_message(then)
    await pilot.pause()
    await widget.remove()


def _forgive(app):
    """Take the error that Textual keeps for tests, which would end this one."""
    assert isinstance(app._exception, LookupError)
    app._exception = None
    app._exception_event.clear()


async def _start(pilot, start):
    start(pilot.app)
    await pilot.pause()


async def _thread(pilot):
    job: Job[None] = Job("thread", fail, lambda message: None)
    job._run()
    outcome = job.take()
    assert "unexpected error (LookupError)" in str(outcome)
    pilot.app.show_failure(outcome)


async def _push(pilot, fails):
    pilot.app.push_screen(BrokenScreen(fails))
    await until(pilot, lambda: pilot.app.screen is pilot.app.chat and pilot.app.failure is not None)


MEMBERS = {
    "a callback": lambda pilot: _start(pilot, lambda app: app.call_later(fail)),
    "a callback of a widget": lambda pilot: _start(pilot, lambda app: app.chat.composer.call_next(fail)),
    "a callback after a refresh": lambda pilot: _start(pilot, lambda app: app.chat.call_after_refresh(fail)),
    "a timer": lambda pilot: _start(pilot, lambda app: app.chat.set_timer(0.001, fail)),
    "a worker": lambda pilot: _start(pilot, lambda app: app.run_worker(fail_later())),
    "a worker thread": lambda pilot: _start(pilot, lambda app: app.chat.run_worker(fail, thread=True)),
    "a command in its thread": lambda pilot: _start(pilot, lambda app: app.chat.conversation.start(fail)),
    "a command beside": lambda pilot: _start(pilot, lambda app: app.chat.conversation.run_aside(fail)),
    "a job": _thread,
    "a message": lambda pilot: _mount(pilot, "", Broken.Asked()),
    "mounting": lambda pilot: _mount(pilot, "mount"),
    "drawing": lambda pilot: _mount(pilot, "render"),
    "a key": lambda pilot: _press(pilot, ["x"]),
    "a button": lambda pilot: _press(pilot, ["enter"]),
    "typed text": lambda pilot: _press(pilot, ["y"]),
    "a screen that is mounted": lambda pilot: _push(pilot, "mount"),
    "a screen that is composed": lambda pilot: _push(pilot, "compose"),
}


@pytest.mark.parametrize("member", MEMBERS)
def test_the_screen_goes_on_and_says_so(member):
    app = chat_app(["before"], ["and after"])

    async def script(pilot):
        await say(pilot, "hello")
        await MEMBERS[member](pilot)
        await until(pilot, lambda: error_log.count() > 0)
        await idle(pilot)
        if app._exception is not None:
            _forgive(app)
        app.set_focus(app.chat.composer)
        await say(pilot, "are you there?")
        assert "and after" in screen_text(app)
        await pilot.press("pageup", "ctrl+end")
        shown = " ".join(each.render().plain for each in app.chat.query("Notice"))
        assert "unexpected error (LookupError)" in shown or app._notifications

    drive_chat(app, script)
    assert app.return_value is None
    log = error_log.path().read_text()
    assert "builtins.LookupError: no answer to" in log
    assert "in fail" in log
    assert TOKEN not in log
    assert error_log.path().stat().st_mode & 0o777 == 0o600


def test_errors_without_an_end_end_the_app_with_one_line():
    app = chat_app(["before"])

    async def script(pilot):
        for _ in range(error_guard.MANY):
            app.call_later(fail)
        await asyncio.wait_for(pilot._app._task, 30)

    with pytest.raises(LookupError):  # Textual raises it for tests
        drive_chat(app, script)
    assert app.return_code == 1
    assert "unexpected error (LookupError)" in str(app.failure)
    assert app._exit_renderables == []
    assert error_log.count() == 1  # the same error


def test_an_app_that_cannot_start_ends_with_one_line(monkeypatch):
    app = chat_app(["before"])
    app.chat.compose = fail

    async def script(pilot):
        await asyncio.wait_for(pilot._app._task, 30)

    with pytest.raises(LookupError):
        drive(app, script)
    assert app.return_value is None
    assert app._exit_renderables == []
    assert "unexpected error (LookupError)" in str(app.failure)


def test_the_end_of_the_thread_that_reads_keys_is_no_traceback():
    app = chat_app(["before"])

    async def script(pilot):
        try:
            fail()
        except LookupError:
            app.panic(Traceback(show_locals=True))
        await asyncio.wait_for(pilot._app._task, 30)

    with pytest.raises(RuntimeError):
        drive_chat(app, script)
    assert app._exit_renderables == []
    assert TOKEN not in error_log.path().read_text()
