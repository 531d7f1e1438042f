"""What is seen of a download at a terminal, by every verb that fetches; elsewhere nothing."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from localq import settings
from localq.chat import open_model
from localq.cli import execute, progress
from localq.cli.line.session import TerminalWatcher
from localq.errors import LocalqError
from localq.files.catalog import Target
from localq.planner import prepare
from localq.wording import OnProgress

MB = 10**6
SEEN = r"model\.safetensors .* 2\.\d/4\.0 MB .*\d MB/s 0:00:\d\d"


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """What stands on it."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(progress, "is_rich_terminal", lambda stream: True)
    monkeypatch.setattr(progress, "stderr_console", lambda: console)
    return written


def transfer(show: OnProgress, upto: int) -> None:
    for done in range(0, upto + 1, MB // 2):
        show("model.safetensors", done, 4 * MB)
        time.sleep(0.02)


def matches(terminal: io.StringIO, pattern: str) -> bool:
    return re.search(pattern, terminal.getvalue()) is not None


def test_file_bytes_rate_and_time_that_is_left(terminal):
    with progress.fetch_bar("tiny", quiet=False) as show:
        transfer(show, 5 * MB // 2)
    assert matches(terminal, SEEN)


def test_nothing_is_drawn_where_nothing_is_fetched_nor_after_the_last_byte(terminal):
    with progress.fetch_bar("tiny", quiet=False) as show:
        assert terminal.getvalue() == ""
        transfer(show, 4 * MB)
        before = terminal.getvalue()
        time.sleep(0.25)  # two turns of a bar that goes on
        assert terminal.getvalue() == before != ""


@pytest.mark.parametrize("quiet", [True, False])
def test_no_terminal_no_bar(capsys, quiet):
    with progress.fetch_bar("tiny", quiet, announced=True) as show:
        transfer(show, 4 * MB)
    assert capsys.readouterr().err == ("" if quiet else "downloading tiny\n")


def test_chat_and_run_show_the_same_as_pull(terminal, monkeypatch, tmp_path):
    """Here the model breaks off half way."""

    def half(target, say, on_progress, offline):
        transfer(on_progress, 5 * MB // 2)
        raise LocalqError("tiny", "broken off")

    class Client:
        def __init__(self, shared):
            """No server."""

        def start(self):
            """No process: nothing is loaded."""

        close = start

    monkeypatch.setattr(open_model, "_target", lambda *asked: Target("tiny", "folder", path=tmp_path))
    monkeypatch.setattr(open_model, "EngineClient", Client)
    monkeypatch.setattr(prepare, "model_path", half)
    opened = open_model.open_session("tiny", settings.Settings(), TerminalWatcher())
    with pytest.raises(LocalqError, match="broken off"), opened:
        pass
    assert matches(terminal, SEEN)


@pytest.mark.parametrize("verb", [["bench", "--device", "cpu", "-n", "4"], ["eval", "--device", "cpu"]])
def test_so_do_bench_and_eval(terminal, monkeypatch, capsys, verb):
    def half(name, say, on_progress, offline):
        transfer(on_progress, 5 * MB // 2)
        raise LocalqError("tiny", "broken off")

    monkeypatch.setattr(prepare, "source_path", half)
    assert execute([*verb, "smollm2-135m"]) == 1
    assert "broken off" in capsys.readouterr().err
    assert matches(terminal, SEEN)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["set_live", "show_cursor", "push_render_hook"])
def test_ctrl_c_at_any_step_of_the_start_is_ctrl_c_and_leaves_the_cursor(terminal, monkeypatch, step, behind):
    """Of a bar of a download, and of one that runs from the beginning."""
    known, interrupted = getattr(Console, step), []

    def interrupt(console: Console, *given: object) -> object:
        found = known(console, *given) if behind or interrupted else None
        if interrupted:
            return found
        interrupted.append(step)
        raise KeyboardInterrupt

    def fetched() -> None:
        with progress.fetch_bar("tiny", quiet=False) as show:
            show("model.safetensors", 1, 2)

    def ran() -> None:
        with progress.run_bar(3, quiet=False):
            pass

    for bar in (fetched, ran):
        interrupted.clear()
        monkeypatch.setattr(Console, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            bar()
        monkeypatch.setattr(Console, step, known)
        assert terminal.getvalue().count("\x1b[?25l") <= terminal.getvalue().count("\x1b[?25h")
