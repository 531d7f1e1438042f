"""Signals that end the app: it leaves as it would by a key, and where it cannot it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from localq.errors import ExitCode

DIES_WITHIN_S = 5.0  # of a signal, whatever stands still
CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
}


def heed(leave: Callable[[int], None]) -> None:
    """Have `leave` called in the loop that runs here, with an exit code, at any of `CODES`.

    Python's own handlers: those of the loop would not be heard where it waits for a terminal that takes nothing.
    Whoever runs the app puts back what was there before.
    """
    loop = asyncio.get_running_loop()

    def end(number: int, frame: FrameType | None) -> None:
        last = threading.Timer(DIES_WITHIN_S, os._exit, (CODES[signal.Signals(number)],))
        last.daemon = True
        last.start()
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(leave, CODES[signal.Signals(number)])

    for number in CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` asks to go on
            signal.signal(number, end)
