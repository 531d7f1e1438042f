"""Signals that end the app: it leaves as it would by a key, and where it cannot it dies."""

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

DIES_WITHIN_S = 5.0  # of a signal, whatever stands still
CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
}


def install(leave: Callable[[int], None]) -> None:
    """Have `leave` called in the loop that runs here, with an exit code, at any of `CODES`.

    Python's own handlers: those of the loop would not be heard where it waits for a terminal that takes nothing.
    Whoever runs the app puts back what was there before.
    """
    loop = asyncio.get_running_loop()
    codes: SimpleQueue[int] = SimpleQueue()  # what is interrupted may hold any lock: to put into this takes none

    def die() -> None:
        code = codes.get()
        time.sleep(DIES_WITHIN_S)
        os._exit(code)

    def end(number: int, frame: FrameType | None) -> None:
        codes.put(CODES[signal.Signals(number)])
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(leave, CODES[signal.Signals(number)])

    threading.Thread(target=die, daemon=True).start()

    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` asks to go on
            signal.signal(number, end)
