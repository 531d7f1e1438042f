"""The full screen at a terminal that is gone, or takes nothing more: it ends all the same."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.cli import terminal_faces
from tests.support.cli.terminal_faces import Place, Tui

FACE = Tui()
F1_AND_BACK = b"\x1bOPq"
WAIT_S = 30.0  # it takes less than a second, or 5 where nothing helps but to stop


@pytest.fixture
def terminal(tmp_path):
    terminal = FACE.start(Place(tmp_path))
    terminal.until(lambda: FACE.is_ready(terminal))
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)], ids=["term", "hup", "int"]
)
def test_a_signal_ends_it_and_the_terminal_is_as_it_was(terminal, number, code):
    terminal.process.send_signal(number)
    assert terminal.wait() == code
    assert terminal.modes.on == set()


@pytest.mark.parametrize("seen", [b"\x1b[?1049h", b"\x1b[?1000h", b"\x1b[?2004h"], ids=["screen", "mouse", "pastes"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["term", "hup"])
def test_a_signal_while_it_starts_leaves_no_modes(tmp_path, number, seen):
    """Sent as soon as the terminal has its first modes, before anything is drawn."""
    terminal = FACE.start(Place(tmp_path))
    terminal.until(lambda: seen in terminal.raw)
    terminal.process.send_signal(number)
    assert terminal.wait() == 143
    assert terminal.modes.on == set()


def test_a_terminal_that_is_closed_ends_it(terminal):
    os.close(terminal.slave)
    os.close(terminal.master)
    assert terminal.process.wait(WAIT_S) == 143


def test_a_terminal_that_takes_nothing_more_does_not_keep_it_from_ending(terminal):
    for _ in range(100):
        os.write(terminal.master, F1_AND_BACK)  # each is drawn anew, and nobody reads
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(WAIT_S) == 143


STUCK = """
from localq.tui import app
from localq.tui.terminal import signals
from tests.support.cli import terminal_localq
app.LocalqApp.leave = lambda *_: None
signals.DIES_WITHIN_S = 0.3
terminal_localq.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"])
def test_an_app_that_is_ended_by_force_leaves_the_terminal_as_it_was(tmp_path, monkeypatch, number, code):
    monkeypatch.setattr(terminal_faces, "COMMAND", (sys.executable, "-c", STUCK))
    with FACE.start(Place(tmp_path), TERM="xterm-kitty") as terminal:
        terminal.until(lambda: FACE.is_ready(terminal))
        terminal.process.send_signal(number)
        assert terminal.wait() == code
        assert terminal.left_behind() == []
