"""Bars at a terminal: a Ctrl-C while one starts leaves the cursor as it was."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from localq.cli import progress

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def fetch() -> None:
    with progress.fetch_bar("model", quiet=False) as show:
        show("downloading model", 1, 10)


def quantize() -> None:
    with progress.quantize_bar(quiet=False) as show:
        assert show is not None
        show("quantizing", 1, 10)


def bench() -> None:
    with progress.run_bar(3, quiet=False) as show:
        show("pp512")


def kernels() -> None:
    with progress.case_bar(quiet=False)("nf4_gemv", 1, 10):
        pass


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, legacy_windows=False)
    monkeypatch.setattr(progress, "is_rich_terminal", lambda stream: True)
    monkeypatch.setattr(progress, "stderr_console", lambda: console)
    return written


@pytest.mark.parametrize("bar", [fetch, quantize, bench, kernels])
def test_a_signal_while_a_bar_starts_leaves_the_cursor_shown(bar, terminal, monkeypatch):
    start = Progress.start

    def interrupted(self: Progress) -> None:
        start(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bar()
    text = terminal.getvalue()
    assert HIDDEN in text
    assert text.rindex(SHOWN) > text.rindex(HIDDEN)


@pytest.mark.parametrize("bar", [fetch, quantize, bench, kernels])
def test_a_bar_ends_with_the_cursor_shown(bar, terminal):
    bar()
    text = terminal.getvalue()
    assert text.rindex(SHOWN) > text.rindex(HIDDEN)
