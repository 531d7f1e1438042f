"""Several processes and threads that save at once."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from localq.chat.history.conversation import Message
from localq.chat.history.store import ConversationStore
from localq.errors import LocalqError
from tests.support.chat.stored_conversations import talk

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    return ConversationStore(tmp_path / "data" / "sessions.db")


def test_two_processes_in_one_conversation_add_branches(store):
    session = talk()
    store.save(session)
    here, there = store.load(session.id), store.load(session.id)
    for each, words in ((here, "here"), (there, "there")):
        each.conversation.add(Message("assistant", f"reply {words}"), each.conversation.add_user(words))
        store.save(each)
    here.conversation.add(Message("assistant", "more"), here.conversation.add_user("again"))
    store.save(here)
    both = store.load(session.id).conversation
    assert {turn.message.content for turn in both.turns} == {
        "hello", "hi", "here", "reply here", "there", "reply there", "again", "more",
    }  # fmt: skip
    assert [m.content for m in both.messages()] == ["hello", "hi", "here", "reply here", "again", "more"]


WRITER = """
import sys
from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
store, session = ConversationStore(__import__("pathlib").Path(sys.argv[1])), Record()
for turn in range(40):
    role = "assistant" if turn % 2 else "user"
    session.conversation.add(Message(role, f"{sys.argv[2]} {turn}"), session.conversation.head)
    store.save(session)
"""


def test_four_processes_at_once_lose_nothing(store):
    names = ["ada", "bea", "cid", "dan"]
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(store.path), name], cwd=ROOT) for name in names]
    assert [process.wait(60) for process in running] == [0, 0, 0, 0]
    found = [store.load(each.id).conversation for each in store.summaries()]
    assert sorted([turn.message.content for turn in each.turns] for each in found) == [
        [f"{name} {turn}" for turn in range(40)] for name in names
    ]


def test_a_process_that_does_not_end_its_transaction_is_named(store, monkeypatch):
    monkeypatch.setattr("localq.chat.history.store.BUSY_S", 0.05)
    store.check()
    with sqlite3.connect(store.path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LocalqError, match="another process"):
            store.save(talk())
    other.close()


def test_threads_do_not_disturb_each_other_or_give_up_the_lock_of_the_file(store):
    store.save(talk())
    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
    with store._transaction():
        reader = threading.Thread(target=store.summaries)
        reader.start()
        store._private()
        tried = subprocess.run(
            [sys.executable, "-c", other, str(store.path)], capture_output=True, text=True, check=False
        )
        assert "database is locked" in tried.stderr
        assert reader.is_alive()
    reader.join(10)
    writers = [threading.Thread(target=store.save, args=(talk(str(number)),)) for number in range(20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert len(store.summaries()) == 21


def counted(store: ConversationStore) -> tuple[int, int]:
    """Conversations and turns in the file."""
    with store._transaction() as db:
        return tuple(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("sessions", "turns"))


def saves_that_wait_behind_the_commit(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """The first transaction from now on stops between its COMMIT and what is remembered: (it is there, let go)."""
    ended, go_on, whole = threading.Event(), threading.Event(), ConversationStore._transaction

    @contextlib.contextmanager
    def stopping(self):
        with whole(self) as db:
            yield db
        if not ended.is_set():
            ended.set()
            go_on.wait(20)

    monkeypatch.setattr(ConversationStore, "_transaction", stopping)
    return ended, go_on


def test_ctrl_c_behind_the_commit_writes_nothing_twice(store, monkeypatch):
    store.check()
    session, before = talk(), signal.getsignal(signal.SIGINT)
    ended, go_on = saves_that_wait_behind_the_commit(monkeypatch)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        ended.wait(20)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presses = threading.Thread(target=interrupt)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.save(session)
    finally:
        signal.signal(signal.SIGINT, before)
        go_on.set()
    presses.join(20)
    store.save(session)
    assert counted(store) == (1, 2)
    assert store.load(session.id).rows == session.rows


def test_two_threads_that_save_one_conversation_write_it_once(store, monkeypatch):
    store.check()
    session = talk()
    ended, go_on = saves_that_wait_behind_the_commit(monkeypatch)
    first, second = (threading.Thread(target=store.save, args=(session,)) for _ in range(2))
    first.start()
    assert ended.wait(20)
    second.start()
    second.join(0.1)  # time in which it would write the same again
    go_on.set()
    first.join(20)
    second.join(20)
    assert counted(store) == (1, 2)
