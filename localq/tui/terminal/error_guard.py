"""Unexpected errors on the full screen: the screen shows one line and goes on.

Textual (8.2) ends the app after any exception, and prints the local variables of every frame: tokens, and what was
said. Here the traceback goes to the log (`chat.terminal.error_log`), without them. A widget whose handler failed goes
on with its next message, so `MessagePump._dispatch_message` is wrapped: an exception that escapes it ends the widget's
loop. A screen that cannot be drawn is closed. The app ends, with one line, where it cannot start, or where errors
follow each other without an end.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from typing import Any

from rich.console import RenderableType
from textual._context import active_message_pump
from textual.app import App
from textual.events import Compose, Load, Mount
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.worker import WorkerFailed

from localq.errors import LocalqError

MANY, WITHIN_S = 20, 10.0  # so many errors within so many seconds end the app
SHOWN_EVERY_S = 1.0  # the same error is shown once within this time
_STARTING = (Load, Compose, Mount)

_dispatch = MessagePump._dispatch_message


async def _dispatch_guarded(pump: MessagePump, message: Message) -> None:
    try:
        await _dispatch(pump, message)
    except Exception as error:
        app = pump if isinstance(pump, App) else pump.app
        if not isinstance(app, GuardedApp) or not app.survives(error, pump, message):
            raise


MessagePump._dispatch_message = _dispatch_guarded  # type: ignore[assignment, method-assign]


class GuardedApp(App[int]):
    """An app that goes on after unexpected errors. failure: the last one, as it was shown."""

    def __init__(self, ansi_color: bool = False) -> None:
        super().__init__(ansi_color=ansi_color)
        self.failure: LocalqError | None = None
        self._failed_at: collections.deque[float] = collections.deque(maxlen=MANY)
        self._reported: dict[tuple[str, str, int], tuple[LocalqError, float]] = {}

    def show_failure(self, failure: LocalqError) -> None:
        """Show an unexpected error to the user."""
        self.notify(str(failure), title="Error", severity="error", timeout=20, markup=False)

    def survives(self, error: Exception, pump: MessagePump, message: Message) -> bool:
        """Report an exception of a handler of `pump`; False if the app cannot go on without it."""
        if pump is self and isinstance(message, _STARTING):
            return False  # `_handle_exception` gets it when the app has ended
        self._handle_exception(error)
        return True

    def _handle_exception(self, error: Exception) -> None:
        """In place of Textual's, which ends the app."""
        cause = error.error if isinstance(error, WorkerFailed) else error
        if self._exception is None:  # as Textual's: a test raises it when the app has ended
            self._exception = cause if isinstance(cause, Exception) else error
            self._exception_event.set()
        with contextlib.suppress(Exception):  # reporting must not fail where the rest has
            self._report(cause)
        where = active_message_pump.get(None)
        if isinstance(where, Screen) and not where.is_mounted:
            self.call_later(self._leave_screen, where)
        now_s = time.monotonic()
        self._failed_at.append(now_s)
        if len(self._failed_at) == MANY and now_s - self._failed_at[0] < WITHIN_S:
            self.exit(return_code=1)

    def _report(self, error: BaseException) -> None:
        from localq.chat.terminal import error_log  # start-up cost: only errors need it

        key, now_s = _place_of(error), time.monotonic()
        known, shown_s = self._reported.get(key, (None, -SHOWN_EVERY_S))
        self.failure = known or error_log.unexpected("screen", error)
        if now_s - shown_s >= SHOWN_EVERY_S:
            self._reported[key] = (self.failure, now_s)
            if self._running and not self._exit:
                self.show_failure(self.failure)

    def panic(self, *renderables: RenderableType) -> None:
        """In place of Textual's: the thread that reads keys has ended, so the app ends, without a traceback."""
        from rich.traceback import Traceback  # start-up cost: it imports the highlighter

        for each in renderables:
            if isinstance(each, Traceback):
                raised = each.trace.stacks[0]
                self._handle_exception(RuntimeError(f"reading keys: {raised.exc_type}: {raised.exc_value}"))
        self.exit(return_code=1)

    def _leave_screen(self, screen: Screen[Any]) -> None:
        """Leave a screen that could not be made; without one below, end the app."""
        if len(self.screen_stack) <= 2:  # Textual's own, and the first of the app
            self.exit(return_code=1)
        elif self.screen is screen:
            screen.dismiss(None)

    async def _ready(self) -> None:
        await super()._ready()
        asyncio.get_running_loop().set_exception_handler(self._handle_task)

    def _handle_task(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody takes from a task; asyncio would write it over the screen."""
        if isinstance(error := context.get("exception"), Exception):
            self._handle_exception(error)


def _place_of(error: BaseException) -> tuple[str, str, int]:
    """Return the key that two reports of one error share: type, file and line."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = ("", 0) if frame is None else (frame.tb_frame.f_code.co_filename, frame.tb_lineno)
    return type(error).__name__, *where
