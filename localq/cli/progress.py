"""Progress of a conversion that takes minutes to hours: its share, and how long it still takes.

A bar at a terminal; elsewhere, as in a log file, a line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from localq.cli.fetch_progress import OnProgress
from localq.cli.output import is_rich_terminal, note, stderr_console

WAITING = "fetching"  # how what is done begins where a download is waited for
LINE_EVERY_S = 60.0
LEAST_SHARE = 0.02  # of the work, before it tells how long the rest takes


class Remaining:
    """Seconds that the work still takes, at the pace since its present kind began.

    What was made before an interruption is caught up with quicker than the rest is made, so it has a pace of its own,
    and until that is done nothing is said.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what, self._begun, self._first = "", 0.0, 0

    def seconds(self, what: str, done: int, total: int) -> float | None:
        """None while it is too early to tell."""
        now = self._clock()
        if what.startswith(WAITING) and self._what:  # the time for it is part of the work
            what = self._what
        if what != self._what:
            self._what, self._begun, self._first = what, now, done
            return None
        made = done - self._first
        return None if made < LEAST_SHARE * total else (now - self._begun) / made * (total - done)


def text_of(seconds: float | None) -> str:
    """Rounded as a person would: "about 35 min left"; empty for None."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    return f"about {round(seconds / 60)} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"


@contextmanager
def quantize_bar(quiet: bool) -> Iterator[OnProgress | None]:
    """What to call as the work goes on; None where nobody wants to know."""
    if quiet:
        yield None
        return
    if not is_rich_terminal(sys.stderr):
        yield _lines()
        return
    from rich import progress  # rich costs start-up time

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[left]}"),
    )
    remaining = Remaining()
    with progress.Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("", total=None, left="")

        def update(what: str, done: int, total: int) -> None:
            left = text_of(remaining.seconds(what, done, total))
            bar.update(task, description=what, completed=done, total=total, left=left)

        yield update


def _lines(clock: Callable[[], float] = time.monotonic) -> OnProgress:
    remaining, last = Remaining(clock), clock()

    def update(what: str, done: int, total: int) -> None:
        nonlocal last
        left = text_of(remaining.seconds(what, done, total))
        if clock() - last >= LINE_EVERY_S:
            last = clock()
            note(", ".join(filter(None, (f"{what}: {done / total:.0%}", left))))

    return update
