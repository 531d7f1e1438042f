"""Conversations on disk: they come back as they were, whatever kills, damages or fills the disk meanwhile."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import session_kills

from localq.conversation import Conversation, Message
from localq.errors import LocalqError
from localq.sampling import Sampling
from localq.session_record import ChatSettings, Session
from localq.sessions import APPLICATION_ID, SCHEMA, SessionStore
from localq.stats import Stats

ROOT = Path(__file__).parents[1]
STATS = Stats("done", 10, 4, 6, 7, 0.25, 0.2, 1.5, 17, 4096)


@pytest.fixture
def store(tmp_path) -> SessionStore:
    return SessionStore(tmp_path / "data" / "sessions.db")


def talk(text: str = "hello", reply: str = "hi", model: str = "tiny") -> Session:
    session = Session(model=model)
    session.conversation.add(Message("assistant", reply), session.conversation.say(text), STATS)
    return session


def test_everything_comes_back(store):
    session = talk("Grüße \0\U0001f600", "half", "org/model@nf4")
    session.conversation.system = "Be brief."
    session.settings = ChatSettings(Sampling(0.7, 40, seed=3), 100, ("###", "\n\n"))
    store.save(session)
    session.conversation.add(Message("assistant", "cut", complete=False), 0, STATS)  # a branch
    session.conversation.edit_user("unanswered", 0)
    store.save(session)
    found = store.load(session.id)
    assert found == Session(
        session.conversation, session.model, "Grüße \0\U0001f600", session.settings, session.id, session.rows
    )
    assert [turn.stats for turn in found.conversation.replies()] == [STATS, STATS]


def test_half_characters_are_replaced_and_do_not_stop_a_save(store):
    session = talk("a\ud800b")
    store.save(session)
    assert store.load(session.id).conversation.turns[0].message.content == "a?b"


def test_only_the_user_can_read_it_and_wider_rights_are_taken_back(store):
    old = os.umask(0)
    try:
        store.check()
    finally:
        os.umask(old)
    assert store.path.stat().st_mode & 0o777 == 0o600
    store.path.chmod(0o644)
    store.save(talk())
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in store.path.parent.iterdir()] == ["sessions.db"]  # whole on its own


def test_lists_are_by_last_use_also_when_the_clock_jumps(store, monkeypatch):
    first, second = talk("about ships", "100% sure"), talk("about trees", "a_b")
    for session in (first, second):
        store.save(session)
    monkeypatch.setattr(time, "time", lambda: -5e9)
    store.save(first)
    assert [each.title for each in store.summaries()] == ["about ships", "about trees"]
    assert [each.id for each in store.summaries("SHIPS")] == [first.id]
    assert [each.id for each in store.summaries("0% s")] == [first.id]  # in a turn; no pattern
    assert [each.id for each in store.summaries("a_b")] == [second.id]
    assert store.summaries("x%") == []
    assert store.find(None).id == first.id
    assert store.find("TREES").id == second.id
    assert store.find(str(second.id)).id == second.id
    for wanted in ("nothing like it", "99", "9" * 40):
        with pytest.raises(LocalqError, match="no such conversation") as caught:
            store.find(wanted)
        assert caught.value.exit_code == 2


def test_a_title_is_found_among_thousands_and_where_it_is_a_number(store):
    old, number = talk("Ärger with ships"), talk("20245")
    for session in (old, number):
        store.save(session)
    with store._transaction() as db:
        for place in range(1100):
            values = (f"talk {place}", 10 + place)
            db.execute("INSERT INTO sessions VALUES (NULL, ?, 'tiny', NULL, 'null', NULL, ?, 0, NULL)", values)
    assert store.find("ärger WITH ships").id == store.find("ärger").id == old.id
    assert store.find("20245").id == number.id
    assert store.find("1").id == old.id
    with pytest.raises(LocalqError, match="no such conversation"):
        store.find("2024")  # a number is not completed


def test_renamed_deleted_restored_and_at_last_gone(store, monkeypatch):
    session = talk("private words")
    store.save(session)
    store.rename(session.id, "A name")
    store.save(session)  # does not undo it
    assert store.load(session.id).title == "A name"
    store.delete(session.id)
    assert store.summaries() == []
    with pytest.raises(LocalqError, match="no such"):
        store.load(session.id)
    store.restore(session.id)
    assert len(store.load(session.id).conversation.turns) == 2
    store.delete(session.id)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * 86400)
    store.check()
    with pytest.raises(LocalqError, match="no such"):
        store.restore(session.id)
    assert b"private words" not in store.path.read_bytes()
    store.save(session)  # whoever still has it open loses nothing
    assert len(store.load(session.id).conversation.turns) == 2


def test_two_processes_in_one_conversation_add_branches(store):
    session = talk()
    store.save(session)
    here, there = store.load(session.id), store.load(session.id)
    for each, words in ((here, "here"), (there, "there")):
        each.conversation.add(Message("assistant", f"reply {words}"), each.conversation.say(words))
        store.save(each)
    here.conversation.add(Message("assistant", "more"), here.conversation.say("again"))
    store.save(here)
    both = store.load(session.id).conversation
    assert {turn.message.content for turn in both.turns} == {
        "hello", "hi", "here", "reply here", "there", "reply there", "again", "more",
    }  # fmt: skip
    assert [m.content for m in both.messages()] == ["hello", "hi", "here", "reply here", "again", "more"]


WRITER = """
import sys
from localq.conversation import Message
from localq.sessions import Session, SessionStore
store, session = SessionStore(__import__("pathlib").Path(sys.argv[1])), Session()
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


def test_a_process_that_is_killed_while_it_saves_leaves_the_state_before_or_after(tmp_path):
    report = session_kills.campaign(tmp_path, kills=150, seed=20)
    assert report.wrong == []
    assert report.kills == 150
    assert all(report.lives[f"{way}, some turns saved"] >= 5 for way in session_kills.WAYS), report.lives
    assert report.lives["size, no turns saved"] >= 5


def test_the_campaign_would_find_a_save_that_is_not_one_transaction(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def without_journal(*arguments: object, **options: object) -> sqlite3.Connection:
        database = connect(*arguments, **options)
        database.execute("PRAGMA journal_mode = OFF")
        return database

    monkeypatch.setattr("localq.sessions.sqlite3.connect", without_journal)
    try:
        found = session_kills.campaign(tmp_path, kills=150, seed=20).wrong
    except (LocalqError, sqlite3.DatabaseError) as error:  # so damaged that it cannot even be looked at
        found = [str(error)]
    assert found != []


def limited(size: int) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_is_named_and_the_turns_are_saved_when_there_is_room(store):
    session = talk()
    store.save(session)
    before = store.load(session.id)
    session.conversation.say("x" * 20_000)
    for step in range(0, 60_000, 4096):
        child = os.fork()
        if child == 0:
            try:
                limited(store.path.stat().st_size + step - 20_000)
                store.save(session)
            except LocalqError as error:
                os._exit(int(error.exit_code))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == 9
        assert store.load(session.id) == before
    else:
        pytest.fail("nothing was ever saved")
    assert step > 0
    assert len(store.load(session.id).conversation.turns) == len(session.conversation.turns)


@pytest.mark.parametrize(
    ("version", "ours", "why"),
    [
        (SCHEMA + 1, APPLICATION_ID, "newer localq"),
        (SCHEMA, 7, "no conversations of localq"),
        (0, 0, "no conversations"),
    ],
)
def test_a_newer_or_foreign_file_is_refused_and_left_as_it_is(store, version, ours, why):
    store.save(talk())
    with sqlite3.connect(store.path) as database:
        database.execute(f"PRAGMA user_version = {version}")
        database.execute(f"PRAGMA application_id = {ours}")
    database.close()
    before = store.path.read_bytes()
    for use in (store.check, store.summaries, lambda: store.load(1), lambda: store.save(talk())):
        with pytest.raises(LocalqError, match=why) as caught:
            use()
        assert caught.value.exit_code == 8
        assert "--no-save" in str(caught.value)
    assert store.path.read_bytes() == before


def test_damage_is_a_clear_error_and_changes_nothing(store, tmp_path):
    session = talk()
    for turn in range(30):
        session.conversation.add(Message("assistant", "y" * 900), session.conversation.say(f"{turn} " + "x" * 700))
    store.save(session)
    whole, rng, refused = store.path.read_bytes(), random.Random(11), 0
    for case in range(300):
        damaged = bytearray(whole)
        if case % 3 == 0:
            del damaged[rng.randrange(1, len(whole)) :]
        elif case % 3 == 1:
            for _ in range(rng.randint(1, 200)):
                damaged[rng.randrange(len(whole))] = rng.randrange(256)
        else:
            place = rng.randrange(len(whole))
            damaged[place : place + 4096] = bytes(len(damaged[place : place + 4096]))
        other = SessionStore(tmp_path / "damaged.db")
        other.path.write_bytes(damaged)
        for use in (other.summaries, lambda at=other: at.load(session.id)):
            code = 0
            try:
                use()
            except LocalqError as error:
                code = error.exit_code
            assert code in (0, 2, 8)
            refused += code != 0
        assert other.path.read_bytes() == damaged
    assert refused > 150


def test_garbage_and_a_folder_in_its_place(store):
    store.path.parent.mkdir()
    store.path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(LocalqError, match="damaged") as caught:
        store.check()
    assert caught.value.exit_code == 8
    store.path.unlink()
    store.path.mkdir()
    with pytest.raises(LocalqError) as caught:
        store.check()
    assert caught.value.exit_code == 9


def test_a_process_that_does_not_end_its_transaction_is_named(store, monkeypatch):
    monkeypatch.setattr("localq.sessions.BUSY_S", 0.05)
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


def counted(store: SessionStore) -> tuple[int, int]:
    """Conversations and turns in the file."""
    with store._transaction() as db:
        return tuple(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("sessions", "turns"))


def saves_that_wait_behind_the_commit(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """The first transaction from now on stops between its COMMIT and what is remembered: (it is there, let go)."""
    ended, go_on, whole = threading.Event(), threading.Event(), SessionStore._transaction

    @contextlib.contextmanager
    def stopping(self):
        with whole(self) as db:
            yield db
        if not ended.is_set():
            ended.set()
            go_on.wait(20)

    monkeypatch.setattr(SessionStore, "_transaction", stopping)
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


def test_ten_thousand_stored_turns_do_not_slow_the_start(store):
    for number in range(100):
        session = Session(Conversation(), "tiny", f"talk {number}")
        for turn in range(50):
            session.conversation.add(Message("assistant", "y" * 300), session.conversation.say(f"{turn} " + "x" * 200))
        store.save(session)
    best = {}
    for _ in range(5):
        for name, use in (
            ("check", store.check),
            ("last", lambda: store.find(None)),
            ("list", lambda: store.summaries(limit=20)),
        ):
            start = time.perf_counter()
            use()
            best[name] = min(best.get(name, 9.0), time.perf_counter() - start)
    assert max(best.values()) < 0.1, best  # measured: 4 ms at most
