"""Chats that leave a snapshot behind and take one up."""

from __future__ import annotations

import contextlib

import pytest

from localq.chat import side_request
from localq.chat.history import snapshot_files, snapshot_keeper
from localq.chat.history.record import Record
from localq.chat.history.snapshot_keeper import SnapshotKeeper
from localq.chat.history.store import ConversationStore
from localq.chat.open_model import OpenSession
from localq.chat.reply import Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.cli.line import line_chat
from localq.cli.line.session import TerminalWatcher
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.worker.client import EngineClient
from localq.worker.messages import Generate, Load, Tokens
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.chat.stored_snapshots import DEATH, LONG, Engine, own_folder
from tests.support.models import tiny_checkpoints


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    own_folder(monkeypatch, tmp_path)


class KeepingClient(ScriptedClient):
    """Keeps files besides what it replies."""

    def __init__(self, *scripts: list) -> None:
        super().__init__(*scripts)
        self.engine = Engine()

    def generate(self, request: Generate):
        for event in super().generate(request):
            yield type(event)(**{**vars(event), "stats": LONG}) if hasattr(event, "reason") else event

    def save_cache(self, path: str) -> int:
        return self.engine.save_cache(path)

    def restore_cache(self, path: str) -> int:
        return self.engine.restore_cache(path)


def told_by(parts) -> Reply:
    return next(part for part in parts if not isinstance(part, ReplyPiece))


def test_a_chat_writes_what_it_leaves_and_takes_up_what_it_goes_on_with():
    client, store = KeepingClient(["one"], ["two"], ["three"]), ConversationStore()
    session = ChatSession(client, Load("path", LoadOptions("model")), CharTokenizer(), store=store)
    session.keeper = SnapshotKeeper(store.path, 2**30)
    told_by(session.ask("a"))
    session.switch_to(Record())
    assert client.engine.since() == []  # nothing has taken its place so far
    told_by(session.ask("b"))
    assert client.engine.since() == [("save", "1")]
    session.switch_to(store.load(1))
    client.engine.error = LocalqError("snapshot not used", "it was made with another format")
    assert told_by(session.ask("c")).text == "three"
    assert client.engine.since() == [("save", "2"), ("restore", "1")]
    assert session.keeper.take_notice().startswith("snapshot not")
    client.engine.error = None
    session.save_snapshot()
    assert client.engine.since() == [("save", "1")]


@pytest.mark.parametrize("failure", [None, LocalqError("engine", "it ran out of memory")])
def test_what_was_written_before_something_else_was_read_comes_back(failure):
    client, store = KeepingClient(["one"], [failure or "besides"], ["two"]), ConversationStore()
    session = ChatSession(client, Load("path", LoadOptions("model")), CharTokenizer(), store=store)
    session.keeper = SnapshotKeeper(store.path, 2**30)
    told_by(session.ask("a"))
    with contextlib.suppress(LocalqError):
        told_by(side_request.ask(session, "sum it up", 9))
    client.alive = True  # the error ends the scripted engine, and not the real one
    told_by(session.ask("b"))
    assert client.engine.since() == [("save", "1"), ("restore", "1")]


def test_a_chat_without_a_keeper_leaves_at_once():
    session = ChatSession(KeepingClient(), Load("path", LoadOptions("model")), CharTokenizer())
    session.save_snapshot()
    assert session.client.engine.since() == []


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), ""), (DEATH, f"[snapshot not saved: {DEATH}]\n")],
    ids=["Ctrl-C", "a failure"],
)
def test_the_line_chat_ends_whatever_becomes_of_the_snapshot(error, told, capsys):
    client, store = KeepingClient(["one"]), ConversationStore()
    session = ChatSession(client, Load("path", LoadOptions("model")), CharTokenizer(), store=store)
    session.keeper = SnapshotKeeper(store.path, 2**30)
    told_by(session.ask("a"))
    client.engine.error = error
    line_chat._leave(OpenSession(session, client), TerminalWatcher(), True)
    assert client.engine.since() == [("save", "1")]
    assert capsys.readouterr().err == told


class Recording(EngineClient):
    """A real engine whose ids are kept."""

    ids: list[int]

    def generate(self, request: Generate):
        self.ids = []
        for event in super().generate(request):
            self.ids += event.ids if isinstance(event, Tokens) else []
            yield event


@pytest.mark.slow
def test_a_continued_chat_shares_what_was_read_and_says_the_same(tmp_path, monkeypatch):
    """What the process that had read it all says next, another says with its snapshot."""
    from localq.files.model_folder import open_model
    from localq.text.tokenizer import Tokenizer

    monkeypatch.setattr(snapshot_keeper, "WORTH_S", -1.0)
    checkpoint = tiny_checkpoints.make_checkpoint(tmp_path / "model")
    store, tokenizer = ConversationStore(), Tokenizer.load(open_model(checkpoint))
    path, found = snapshot_files.snapshot_path(store.path, 1), []
    for name in ("writes", "restores"):
        with Recording() as client:
            session = ChatSession(
                client, Load(str(checkpoint), LoadOptions("m", "cpu")), tokenizer, max_tokens=12, store=store
            )
            session.keeper = SnapshotKeeper(store.path, 2**30)
            if name == "writes":
                told_by(session.ask("Remember " + "many words " * 12))
                session.save_snapshot()
                assert path.exists()
            else:
                session.record = store.load(1)
                session.conversation.head = 1
            stats = told_by(session.ask("And then?")).stats
            found.append((client.ids, stats.cached_tokens, stats.prompt_tokens))
            assert session.keeper.take_notice() == ""
    assert found[0] == found[1]
    assert found[0][1] > 100
    assert len(found[0][0]) > 0
