"""Driving a Textual app from a test that is no coroutine, and waiting for what is seen instead of for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from textual.app import App, ComposeResult
from textual.message import Message
from textual.pilot import Pilot
from textual.widget import Widget

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

    asyncio.run(run())
    return app.return_value


async def until(pilot: Pilot[Any], condition: Callable[[], object], what: str = "") -> None:
    """Wait until `condition()` holds, while the app goes on."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert pilot.app._exception is None, "the app has failed"
        assert time.monotonic() < end, f"it did not come: {what or condition}"
        await pilot.pause(0.01)


def screen_text(app: App[Any]) -> str:
    """What the screen shows, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
