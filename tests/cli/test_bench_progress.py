"""Progress of `localq bench --kernels`: drawn while a kernel is measured, gone when its line is printed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from localq.cli import progress

GONE = "\x1b[2K"  # erases the line


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    screen = io.StringIO()
    monkeypatch.setattr(progress, "is_rich_terminal", lambda stream: True)
    monkeypatch.setattr(
        progress, "stderr_console", lambda: Console(file=screen, force_terminal=True, width=80, color_system=None)
    )
    return screen


def test_a_bar_for_every_case_that_leaves_no_trace(terminal):
    on_case = progress.case_bar(quiet=False)
    for done, kernel in enumerate(("gemv", "dequantize")):
        with on_case(kernel, done, 2):
            pass
        shown = terminal.getvalue()
        assert kernel in shown
        assert f"{done}/2" in shown
        assert shown.rindex(GONE) > shown.rindex(f"{done}/2")
        terminal.write("\na line of the table\n")


@pytest.mark.parametrize("quiet", [True, False])
def test_nothing_without_a_terminal_or_when_quiet(terminal, monkeypatch, quiet):
    monkeypatch.setattr(progress, "is_rich_terminal", lambda stream: quiet)
    with progress.case_bar(quiet)("gemv", 0, 1):
        pass
    assert terminal.getvalue() == ""
