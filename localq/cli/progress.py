"""Progress of a conversion that takes minutes to hours: its share, and how long it still takes.

A bar at a terminal; elsewhere, as in a log file, a line now and then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from localq.chat.terminal.transfer_rate import LEAP_BYTES
from localq.cli.output import is_rich_terminal, note, stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

OnProgress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in total (0: not counted)


@contextlib.contextmanager
def fetch_bar(name: str, quiet: bool, *, announced: bool = False) -> Iterator[OnProgress]:
    """What is called as `name` is fetched. No terminal: one line, if it is to be announced; nothing with -q."""
    if quiet or not is_rich_terminal(sys.stderr) or _unwanted():
        if announced and not quiet:
            note(f"fetching {name}")
        yield lambda what, done, total: None
        return
    bar = _Bar(name)
    try:
        yield bar.show
    finally:
        bar.close()


def _unwanted() -> bool:
    """As the hub's own client reads it."""
    return os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").lower() in ("1", "true", "yes", "on")


class _Bar:
    """There only while something is fetched or checked: what is here already costs no start of rich."""

    def __init__(self, name: str) -> None:
        self._name, self._before = name, 0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, what: str, done: int, total: int) -> None:
        if self._progress is None or self._task is None:
            self._progress = _started()
            self._task = self._progress.add_task(self._name, total=None)
        if done - self._before > LEAP_BYTES:  # it was here: the rate and what is left are of what comes in
            self._progress.reset(self._task, completed=done, total=total or None)
        self._progress.update(self._task, description=what, completed=done, total=total or None)
        self._before = done
        if 0 < total <= done:
            self.close()  # what follows may want the terminal

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._task = None, None


def _started() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=stderr_console(), transient=True)
    progress.start()
    return progress


@contextlib.contextmanager
def run_bar(runs: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Gives the function that is told what is going on. A text said again is the next of `runs` runs of one test."""
    if quiet or not is_rich_terminal(sys.stderr):
        yield lambda text: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        said: Counter[str] = Counter()

        def tell(text: str) -> None:
            bar.update(task, description=text, completed=said[text], total=runs if said[text] else None)
            said[text] += 1

        yield tell


def case_bar(quiet: bool) -> Callable[[str, int, int], AbstractContextManager[Any]]:
    """Gives the `on_case` of `bench.kernels.run`: a bar while a case is measured.

    It is gone before a line of the table is printed, which may go to the same terminal.
    """
    if quiet or not is_rich_terminal(sys.stderr):
        return lambda kernel, done, total: contextlib.nullcontext()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr_console()
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = bar.add_task("starting", total=None)

    def shown(kernel: str, done: int, total: int) -> Progress:
        bar.update(task, description=kernel, completed=done, total=total)
        return bar

    return shown


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
