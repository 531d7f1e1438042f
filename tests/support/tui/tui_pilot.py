"""Driving a Textual app from a test that is no coroutine, and waiting for what is seen instead of for a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import pytest
import textual.app
import textual.pilot
from textual._wait import wait_for_idle
from textual.app import App, ComposeResult
from textual.message import Message
from textual.pilot import Pilot
from textual.widget import Widget

from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient

WAIT_S = 30.0  # for something that comes; a test that passes never waits for it


class HostApp(App[Any]):
    """An app around some widgets."""

    def __init__(self, *widgets: Widget) -> None:
        super().__init__()
        self.widgets = widgets

    def compose(self) -> ComposeResult:
        yield from self.widgets


def drive(
    app: App[Any],
    script: Callable[[Pilot[Any]], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    hook: Callable[[Message], None] | None = None,
) -> Any:
    """Run `app` headless and `script(pilot)` with it; what either raises is raised here. Returns what `app` returns.

    hook: gets every message that any widget handles, once for each that it bubbles through.
    """

    async def run() -> None:
        async with app.run_test(size=size, message_hook=hook) as pilot:
            await script(pilot)

    with _handled_keys(app):
        asyncio.run(run())
    return app.return_value


@contextlib.contextmanager
def _handled_keys(app: App[Any]) -> Iterator[None]:
    """A key counts as pressed once it is handled.

    Textual's pilot takes a process that gets no processor for 20 ms for one that has nothing to do, and goes on.
    """

    async def wait(min_sleep: float = 0.02, max_sleep: float = 1.0) -> None:
        await wait_for_idle(min_sleep, max_sleep)
        empty, end = 0, time.monotonic() + max_sleep
        while empty < 3 and time.monotonic() < end:
            await asyncio.sleep(0)
            empty = 0 if any(pump.message_queue_size for pump in (app, *app._registry)) else empty + 1

    with pytest.MonkeyPatch.context() as patch:
        for module in (textual.app, textual.pilot):
            patch.setattr(module, "wait_for_idle", wait)
        yield


def chat_app(*scripts: Iterable[str | LocalqError], **settings: Any) -> LocalqApp:
    """The app over a scripted engine that answers with `scripts` in turn; nothing is saved."""
    session = ChatSession(ScriptedClient(*scripts), Load("path", LoadOptions("model")), CharTokenizer())
    return LocalqApp(Settings(**settings), session=session)


def drive_chat(
    app: LocalqApp, script: Callable[[Pilot[Any]], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> Any:
    """`drive`, from where the app has taken its session on."""

    async def when_there(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)
        await script(pilot)

    return drive(app, when_there, size)


async def say(pilot: Pilot[Any], text: str) -> None:
    """Type `text` as a paste, send it, and wait until what it starts is drawn."""
    chat = pilot.app.chat
    chat.composer.put(text)
    pilot.app.set_focus(chat.composer)
    await pilot.press("enter")
    await pilot.pause()
    await idle(pilot)


async def idle(pilot: Pilot[Any]) -> None:
    """Wait until no job runs and all is drawn."""
    await until(pilot, lambda: not pilot.app.chat.conversation.busy, "the end of the job")
    await pilot.pause()


async def until(pilot: Pilot[Any], condition: Callable[[], object], what: str = "") -> None:
    """Wait until `condition()` holds, while the app goes on."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert pilot.app._exception is None, "the app has failed"
        assert time.monotonic() < end, f"it did not come: {what or condition}"
        await pilot.pause(0.01)


async def laid_out(pilot: Pilot[Any]) -> None:
    """Wait until the layout is that of what the widgets hold now: a click before that may meet the line beside."""
    done = asyncio.Event()
    pilot.app.screen.call_after_refresh(done.set)
    await until(pilot, done.is_set, "layout")
    await pilot.pause()


def screen_text(app: App[Any]) -> str:
    """What the screen shows, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
