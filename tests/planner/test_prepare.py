"""Weights that a process makes here, under a full screen: none of its words reach the terminal; it can be stopped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from localq.planner import prepare
from localq.wording import OnProgress

LINES = "import sys, time; print('on stdout'); print('layer 1 of 2', file=sys.stderr, flush=True)"


class Captured:
    """What Textual puts in place of stderr while it has the terminal."""

    def fileno(self) -> int:
        return -1

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def run_under_a_full_screen(monkeypatch, script: str, show: OnProgress) -> tuple[int, str]:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Captured())  # not in a fixture: pytest puts its own back before the test begins
        return prepare._run([sys.executable, "-c", script], show)


def test_its_lines_are_progress_and_its_last_one_is_the_cause(monkeypatch, capfd):
    seen: set[str] = set()

    def show(what: str, done: int, total: int) -> None:
        seen.add(what)

    script = f"{LINES}; time.sleep(0.5); print('no room', file=sys.stderr); sys.exit(9)"
    assert run_under_a_full_screen(monkeypatch, script, show) == (9, "no room")
    assert {"layer 1 of 2"} <= seen
    assert capfd.readouterr() == ("", "")


def test_who_stops_it_ends_the_process(monkeypatch, tmp_path):
    pid_file = tmp_path / "pid"
    script = f"{LINES}; import os; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def show(what: str, done: int, total: int) -> None:
        if Path(pid_file).exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_under_a_full_screen(monkeypatch, script, show)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_at_a_terminal_it_shows_itself(capfd):
    assert prepare._run([sys.executable, "-c", f"{LINES}; sys.exit(3)"], None) == (3, "")
    assert capfd.readouterr().err.splitlines()[-1] == "layer 1 of 2"
