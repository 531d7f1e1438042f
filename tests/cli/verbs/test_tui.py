"""When `localq chat` opens the full screen, and how `localq tui` and `localq chat` end after it."""

from __future__ import annotations

import io
import sys
from functools import partialmethod

import pytest

from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.cli import execute, main, output
from localq.cli.verbs import chat as verb
from localq.cli.verbs import tui
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.jobs.model_handle import ModelHandle
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / name.lower()))


@pytest.fixture
def opened(monkeypatch):
    """Which front end was opened."""
    found: list[str] = []
    monkeypatch.setattr("localq.cli.verbs.tui.run_app", lambda *_, **more: found.append("full screen") or 0)
    monkeypatch.setattr("localq.cli.line.line_chat.converse", lambda *_, **more: found.append("lines") or 0)
    monkeypatch.setattr(verb, "has_screen", lambda: True)
    return found


@pytest.mark.parametrize(
    ("arguments", "config", "what"),
    [
        ([], "", "full screen"),
        (["--plain"], "", "lines"),
        (["-q"], "", "lines"),
        (["-p", "hello"], "", "lines"),
        ([], 'ui = "plain"\n', "lines"),
        ([], 'ui = "auto"\n', "full screen"),
        (["--temperature", "1"], "", "full screen"),
    ],
)
def test_chat_opens_the_full_screen_unless_lines_are_wanted(opened, tmp_path, monkeypatch, arguments, config, what):
    (tmp_path / "config").write_text(config)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert execute(["chat", "smollm2-135m", *arguments]) == 0
    assert opened == [what]


def test_where_there_is_no_screen_it_goes_by_lines(opened, monkeypatch):
    monkeypatch.setattr(verb, "has_screen", lambda: False)
    assert execute(["chat", "smollm2-135m"]) == 0
    assert opened == ["lines"]


def test_tui_needs_a_terminal(capsys):
    assert execute(["tui"]) == ExitCode.USAGE
    assert "Use `localq chat --plain` for line mode" in capsys.readouterr().err


def test_bare_localq_is_the_help_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["localq"])
    with pytest.raises(SystemExit):
        main()
    assert "Usage: localq" in "".join(capsys.readouterr())


def test_bare_localq_is_tui_at_a_terminal(monkeypatch):
    found = []
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr("localq.cli.command_line.has_screen", lambda: True)
    monkeypatch.setattr("localq.cli.command_line.execute", lambda arguments: found.append(arguments) or 0)
    monkeypatch.setattr("sys.argv", ["localq"])
    with pytest.raises(SystemExit):
        main()
    assert found == [["tui"]]


def shown(monkeypatch, run, store=None) -> int:
    monkeypatch.setattr(LocalqApp, "run", run)
    return tui.run_app(Settings(), Start(None, store))


def with_model(app: LocalqApp, store: ConversationStore | None, closed: list[str]) -> ChatSession:
    session = ChatSession(ScriptedClient(["yes"]), Load("path", LoadOptions("model")), CharTokenizer(), store=store)
    model = ModelHandle.for_session(session)
    app.model = ModelHandle(session, model.load, lambda: closed.append("closed"), model.profile)
    return session


def test_afterwards_it_says_where_the_conversation_is_kept(monkeypatch, tmp_path, capsys):
    store, closed = ConversationStore(tmp_path / "sessions.db"), []

    def run(app):
        list(with_model(app, store, closed).ask("hello"))
        return ExitCode.OK

    assert shown(monkeypatch, run, store) == ExitCode.OK
    assert closed == ["closed"]
    assert "Saved as conversation 1. To resume it, run `localq chat --resume 1`." in capsys.readouterr().err


def test_turns_that_could_not_be_saved_end_with_9(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("in the place of a folder")
    store = ConversationStore(tmp_path / "file" / "sessions.db")

    for left, code in ((ExitCode.OK, ExitCode.DISK), (ExitCode.TERMINATED, ExitCode.TERMINATED)):
        run = partialmethod(leave_after_a_turn, store=store, code=left)
        assert shown(monkeypatch, run, store) == code
        said = capsys.readouterr().err
        assert "the last turns of this conversation were not saved" in said
        assert "Saved as" not in said


def leave_after_a_turn(app: LocalqApp, store: ConversationStore, code: ExitCode) -> ExitCode:
    list(with_model(app, store, []).ask("hello"))
    return code


def test_a_model_that_could_not_be_opened_is_said_with_its_exit_code(monkeypatch, capsys):
    def run(app):
        app.error = LocalqError("big", "it does not fit", "Take a small one.", ExitCode.DOES_NOT_FIT)
        return ExitCode.OK

    assert shown(monkeypatch, run) == ExitCode.DOES_NOT_FIT
    assert capsys.readouterr().err == "localq: big: it does not fit. Take a small one.\n"


def test_a_fault_ends_with_1_and_closes_the_engine(monkeypatch):
    closed = []

    def run(app):
        with_model(app, None, closed)  # Textual has shown the traceback

    assert shown(monkeypatch, run) == ExitCode.FAILURE
    assert closed == ["closed"]


def test_a_screen_needs_a_terminal_that_is_not_dumb(monkeypatch):
    class Stream:
        def __init__(self, tty: bool) -> None:
            self.isatty = lambda: tty

    for stdin, stdout, stderr, term in (
        (True, True, True, "xterm"), (False, True, True, "xterm"), (True, False, True, "xterm"),
        (True, True, False, "xterm"), (True, True, True, "dumb"), (True, True, True, ""),
    ):  # fmt: skip
        monkeypatch.setattr("sys.stdin", Stream(stdin))
        monkeypatch.setattr("sys.stdout", Stream(stdout))
        monkeypatch.setattr("sys.stderr", Stream(stderr))
        monkeypatch.setenv("TERM", term)
        assert output.has_screen() == (stdin and stdout and stderr and term == "xterm")
