"""The end of a chat: what could not be saved is tried once more, however the chat is left."""

from __future__ import annotations

import contextlib
import sys

import pytest

from localq.chat import open_model
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.cli.line import line_chat
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient


class Disk(ConversationStore):
    """Saves are refused while `full`."""

    full, saves = True, 0

    def save(self, record) -> None:
        self.saves += 1
        if self.full:
            raise LocalqError("sessions.db", "the disk is full", exit_code=ExitCode.DISK)
        super().save(record)


@pytest.fixture
def leave(monkeypatch, tmp_path, capsys):
    """The lines of `said`, then `ending` instead of a line; gives the store, the exit code and what was told."""
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())

    def leave(ending, mended: bool, full: bool = True, said=("one",)):
        store, lines = Disk(tmp_path / "sessions.db"), iter(said)
        store.full = full

        def read() -> str:
            for line in lines:
                return line
            store.full = full and not mended
            if isinstance(ending, str):
                return ending
            raise ending

        @contextlib.contextmanager
        def opened(*_):
            client = ScriptedClient(["a"])
            talk = ChatSession(client, Load("path", LoadOptions("tiny")), CharTokenizer())
            yield open_model.OpenSession(talk, client)

        monkeypatch.setattr(open_model, "open_session", opened)
        monkeypatch.setattr(line_chat.Reader, "__call__", lambda _: read())
        try:
            code = line_chat.converse(Settings(), Start(store=store), quiet=False)
        except SystemExit as stop:
            code = stop.code
        return store, code, capsys.readouterr().err

    return leave


@pytest.mark.parametrize(("ending", "code"), [(EOFError(), 0), ("/exit", 0), (SystemExit(143), 143)])
def test_what_could_not_be_saved_is_saved_at_the_end(leave, ending, code):
    store, left, told = leave(ending, mended=True)
    assert left == code
    assert [message.content for message in store.find(None).conversation.messages()] == ["one", "a"]
    assert ("Saved as conversation 1" in told) == (code == 0)


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (EOFError(), 9, ("one",)),
        ("/exit", 9, ("one",)),
        (SystemExit(143), 143, ("one",)),
        (EOFError(), 9, ("one", "/model qwen3-8b")),  # the conversation goes on in another session
        (EOFError(), 9, ("one", "/new", "/model qwen3-8b")),
    ],
)
def test_what_is_lost_is_said_and_not_called_kept(leave, ending, code, said):
    _, left, told = leave(ending, mended=False, said=said)
    assert left == code
    assert "the last turns of this conversation" in told
    assert "Saved as" not in told


def test_what_a_session_could_not_save_is_saved_by_the_next(leave):
    store, code, _ = leave(EOFError(), mended=True, said=("one", "/new", "/model qwen3-8b"))
    assert code == 0
    assert [message.content for message in store.find(None).conversation.messages()] == ["one", "a"]


def test_what_is_saved_is_not_saved_again(leave):
    """Another process may have gone on with it meanwhile: this one would put the end back."""
    store, _, told = leave(EOFError(), mended=True, full=False)
    assert store.saves == 2
    assert "Saved as conversation 1" in told
