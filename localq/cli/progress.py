"""Progress bars of the command line: downloads, benchmarks, quantization.

Bars are drawn at a terminal. Elsewhere, as in a log file, quantization prints a line every minute.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from localq.chat.terminal.transfer_rate import LEAP_BYTES
from localq.cli.output import is_rich_terminal, note, stderr, stderr_console
from localq.wording import DOWNLOADING, OnProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextlib.contextmanager
def fetch_bar(name: str, quiet: bool, *, announced: bool = False, verb: str = DOWNLOADING) -> Iterator[OnProgress]:
    """A bar for fetching `name`; without a terminal one line if `announced`, with -q nothing.

    verb   what is done with `name`, for that line
    """
    if quiet or not is_rich_terminal(stderr()) or _is_disabled():
        if announced and not quiet:
            note(f"{verb} {name}")
        yield lambda what, done, total: None
        return
    bar = _Bar(name)
    try:
        yield bar.show
    finally:
        bar.close()


def _is_disabled() -> bool:
    """Return whether HF_HUB_DISABLE_PROGRESS_BARS is set, read as the hub's own client does."""
    return os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").lower() in ("1", "true", "yes", "on")


class _Bar:
    """A download bar, created at the first progress: files already here cost no import of rich."""

    def __init__(self, name: str) -> None:
        self._name, self._before = name, 0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, what: str, done: int, total: int) -> None:
        if self._progress is None or self._task is None:
            self._progress = _download_progress()  # kept before it starts: a Ctrl-C within that needs its end, too
            self._progress.start()
            self._task = self._progress.add_task(self._name, total=None)
        if done - self._before > LEAP_BYTES:  # a part was here: rate and remaining time count new bytes only
            self._progress.reset(self._task, completed=done, total=total or None)
        self._progress.update(self._task, description=what, completed=done, total=total or None)
        self._before = done
        if 0 < total <= done:
            self.close()  # free the terminal for what follows

    def close(self) -> None:
        if self._progress is not None:
            _stop(self._progress)
        self._progress, self._task = None, None


@contextlib.contextmanager
def _running(progress: Progress) -> Iterator[Progress]:
    """`progress`, stopped also where a Ctrl-C comes while it starts: rich would leave the cursor hidden."""
    try:
        progress.start()
        yield progress
    finally:
        _stop(progress)


def _stop(progress: Progress) -> None:
    """Stop `progress`, even if Ctrl-C interrupted its start."""
    try:
        progress.stop()
    except IndexError:  # rich hides the cursor before it adds the hook that it removes here
        progress.console.show_cursor(True)


def _download_progress() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=stderr_console(), transient=True)


@contextlib.contextmanager
def run_bar(runs: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar for benchmark runs: calling it with the same text again counts the next of `runs` runs."""
    if quiet or not is_rich_terminal(stderr()):
        yield lambda text: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _running(Progress(*columns, console=stderr_console(), transient=True)) as bar:
        task = bar.add_task("starting", total=None)
        counts: Counter[str] = Counter()

        def update(text: str) -> None:
            bar.update(task, description=text, completed=counts[text], total=runs if counts[text] else None)
            counts[text] += 1

        yield update


def case_bar(quiet: bool) -> Callable[[str, int, int], AbstractContextManager[Any]]:
    """The `on_case` of `bench.kernels.kernel_bench.run`: a bar while a case is measured.

    It disappears before a line of the table is printed to the same terminal.
    """
    if quiet or not is_rich_terminal(stderr()):
        return lambda kernel, done, total: contextlib.nullcontext()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr_console()
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = bar.add_task("starting", total=None)

    def show(kernel: str, done: int, total: int) -> AbstractContextManager[Any]:
        bar.update(task, description=kernel, completed=done, total=total)
        return _running(bar)

    return show


LINE_EVERY_S = 60.0
LEAST_SHARE = 0.02  # of the work, before an estimate is given


class Remaining:
    """Estimated seconds left, at the pace of the current activity.

    Skipping finished work after an interruption is faster than the rest, so it does not count for the estimate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what, self._started, self._first = "", 0.0, 0

    def seconds(self, what: str, done: int, total: int) -> float | None:
        """Seconds left; None while it is too early for an estimate."""
        now = self._clock()
        if what.startswith(DOWNLOADING) and self._what:  # the wait is part of the work
            what = self._what
        if what != self._what:
            self._what, self._started, self._first = what, now, done
            return None
        advance = done - self._first
        return None if advance < LEAST_SHARE * total else (now - self._started) / advance * (total - done)


def time_left(seconds: float | None) -> str:
    """Rounded text: "about 35 min left"; empty for None."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    return f"about {round(seconds / 60)} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"


@contextmanager
def quantize_bar(quiet: bool) -> Iterator[OnProgress | None]:
    """A bar with the estimated time left, or lines in a log; None if quiet."""
    if quiet:
        yield None
        return
    if not is_rich_terminal(stderr()):
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
    with _running(progress.Progress(*columns, console=stderr_console(), transient=True)) as bar:
        task = bar.add_task("", total=None, left="")

        def update(what: str, done: int, total: int) -> None:
            left = time_left(remaining.seconds(what, done, total))
            bar.update(task, description=what, completed=done, total=total, left=left)

        yield update


def _lines(clock: Callable[[], float] = time.monotonic) -> OnProgress:
    remaining, last = Remaining(clock), clock()

    def update(what: str, done: int, total: int) -> None:
        nonlocal last
        left = time_left(remaining.seconds(what, done, total))
        if clock() - last >= LINE_EVERY_S:
            last = clock()
            note(", ".join(filter(None, (f"{what}: {done / total:.0%}", left))))

    return update
