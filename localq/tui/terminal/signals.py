"""Signals that end the app: it quits as by a key, and is killed if it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType

from localq.errors import ExitCode

DIES_WITHIN_S = 5.0  # after a signal, even if the event loop is stuck
CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
}


def install(leave: Callable[[int], None], reset: Callable[[], None] = lambda: None) -> None:
    """Call `leave` with an exit code in the running loop at any signal of `CODES`.

    reset: resets the terminal before the process is ended by force, while the app may still be drawing.

    Python's handlers, because those of the loop would not run while it waits for a blocked terminal. The caller of the
    app restores the earlier handlers.
    """
    loop = asyncio.get_running_loop()
    codes: SimpleQueue[int] = SimpleQueue()  # the interrupted code may hold any lock; this needs none

    def die() -> None:
        code = codes.get()
        time.sleep(DIES_WITHIN_S)
        reset()
        os._exit(code)

    def end(number: int, frame: FrameType | None) -> None:
        codes.put(CODES[signal.Signals(number)])
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(leave, CODES[signal.Signals(number)])

    threading.Thread(target=die, daemon=True).start()

    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores it
            signal.signal(number, end)
