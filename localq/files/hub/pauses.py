"""Pauses before another try, counted down where the user sees them, and ended by a stop.

A hub may ask for minutes (`Retry-After`), and a wait without a word looks like a hang. Front ends say how a pause is
shown: the command line for its process (`use`), the full screen for the thread of a job (`shown_by`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar

STEP_S = 0.5  # between two reports, so between a stop and its effect
Report = Callable[[float], None]  # gets the seconds left; may raise, which ends the pause
Show = Callable[[str], AbstractContextManager[Report]]  # gets the reason; entered while the pause lasts


@contextlib.contextmanager
def _silent(why: str) -> Iterator[Report]:
    """Show nothing: a library call without a front end."""
    yield lambda left_s: None


_process_wide: list[Show] = [_silent]
_here: ContextVar[Show | None] = ContextVar("pauses", default=None)


def use(show: Show) -> None:
    """Show the pauses of this process by `show`."""
    _process_wide[0] = show


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Show the pauses of this thread by `show` while the context lasts."""
    token = _here.set(show)
    try:
        yield
    finally:
        _here.reset(token)


def pause(seconds: float, why: str, wait: Callable[[float], object] | None = None) -> bool:
    """Wait `seconds`, and report each `STEP_S`. why: what happened, without a full stop.

    wait: waits so many seconds, and returns whether to stop; default: `time.sleep`.

    Returns whether `wait` asked to stop. Raises what a report raises.
    """
    wait, left_s = wait or time.sleep, seconds
    with (_here.get() or _process_wide[0])(why) as report:
        while left_s > 0:
            report(left_s)
            step_s = min(STEP_S, left_s)
            if wait(step_s):
                return True
            left_s -= step_s
    return False


def text(why: str, left_s: float) -> str:
    """The words of a report."""
    return f"retrying in {max(1, round(left_s))} s: {why}"
