"""Progress of a benchmark on stderr: a bar per test, at a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from localq.cli.output import is_rich_terminal, stderr_console


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
