"""Progress of a download on stderr: file, bytes, rate and what is left at a terminal; nothing elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from localq.cli.output import is_rich_terminal, note, stderr_console
from localq.transfer import LEAP_BYTES

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
