"""The line that counts down a pause before another request to the hub.

At a terminal one line counts down and disappears; in a log file, and beside a bar, a line is printed at the beginning
and each minute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from localq.cli.output import is_rich_terminal, note, stderr, stderr_console
from localq.files.hub import pauses
from localq.files.hub.pauses import Report
from localq.sanitize import sanitize

LINE_EVERY_S = 60.0


@contextlib.contextmanager
def show(why: str) -> Iterator[Report]:
    """Show a pause while the context lasts; see `pauses.Show`."""
    has_bar = hasattr(stderr(), "rich_proxied_file")  # rich stands in for the stream while a bar is drawn
    if has_bar or not is_rich_terminal(stderr()):
        yield _lines(why)
        return
    from rich.text import Text  # start-up cost: few commands wait

    def text(left_s: float) -> Text:
        return Text(sanitize(f"{pauses.text(why, left_s)} (Ctrl-C stops)"))

    with stderr_console().status("") as status:
        yield lambda left_s: status.update(text(left_s))


def _lines(why: str) -> Report:
    next_s: float | None = None

    def report(left_s: float) -> None:
        nonlocal next_s
        if next_s is None or left_s <= next_s:
            note(pauses.text(why, left_s))
            next_s = left_s - LINE_EVERY_S

    return report
