"""Conversations on disk that a kill, a full disk, damage or another program has met: nothing kept is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from localq.chat.history.conversation import Message
from localq.chat.history.store import APPLICATION_ID, SCHEMA, ConversationStore
from localq.errors import LocalqError
from tests.support.chat.stored_conversations import talk
from tests.tools import session_kills

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    return ConversationStore(tmp_path / "data" / "sessions.db")


def test_a_process_that_is_killed_while_it_saves_leaves_the_state_before_or_after():
    """In a process of its own: to fork one with all modules of the tests takes longer than the life of the child."""
    command = [sys.executable, "-m", "tests.tools.session_kills", "--kills", "150", "--seed", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert report["kills"] == 150
    lives = Counter(report["lives"])
    assert all(lives[f"{way}, some turns saved"] >= 5 for way in session_kills.WAYS), lives
    assert lives["size, no turns saved"] >= 5


def test_the_campaign_would_find_a_save_that_is_not_one_transaction(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def without_journal(*arguments: object, **options: object) -> sqlite3.Connection:
        database = connect(*arguments, **options)
        database.execute("PRAGMA journal_mode = OFF")
        return database

    monkeypatch.setattr("localq.chat.history.store.sqlite3.connect", without_journal)
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
    session.conversation.add_user("x" * 20_000)
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
        (SCHEMA + 1, APPLICATION_ID, "newer version of localq"),
        (SCHEMA, 7, "not a localq conversation database"),
        (0, 0, "not a localq conversation database"),
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
        session.conversation.add(Message("assistant", "y" * 900), session.conversation.add_user(f"{turn} " + "x" * 700))
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
        other = ConversationStore(tmp_path / "damaged.db")
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


@pytest.mark.parametrize(
    "settings",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"a": ' * 100_000 + "1" + "}" * 100_000,
        "9" * 5_000,
        '{"sampling": {}, "max_tokens": null, "stop": [], "origins": [[1]]}',
        '{"sampling": {}, "max_tokens": null, "stop": [], "origins": "text"}',
    ],
)
def test_settings_that_nobody_has_saved_are_damage(store, settings):
    store.save(talk())
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE sessions SET settings = ?", (settings,))
    with pytest.raises(LocalqError, match="damaged") as caught:
        store.find(None)
    assert caught.value.exit_code == 8


TEXTS = ("sessions.title", "sessions.model", "sessions.system", "turns.content", "turns.role", "summaries.content")


@pytest.mark.parametrize("kind", ["BLOB", "TEXT"])
@pytest.mark.parametrize("where", TEXTS)
def test_bytes_in_the_place_of_a_text_are_shown_as_far_as_they_are_one(store, where, kind):
    """SQLite keeps any bytes in a column of texts: one such conversation costs no other, and none is b'...'."""
    other, session = talk(), talk()
    store.save(other)
    session.conversation.add_summary("what was said", session.conversation.last_reply())
    session.conversation.system = "be brief"
    store.save(session)
    table, column = where.split(".")
    garbled = "" if column == "role" else " || x'ff'"  # a role can be one of two only
    with sqlite3.connect(store.path) as db:
        which = "id" if table == "sessions" else "session"
        changed = f"UPDATE {table} SET {column} = CAST({column}{garbled} AS {kind}) WHERE {which} = ?"
        assert db.execute(changed, (session.id,)).rowcount > 0
    assert [each.id for each in store.summaries()] == [session.id, other.id]
    found = store.load(session.id)
    assert store.find(str(session.id)) == found
    assert store.find(found.title).id == session.id
    now = found.conversation
    texts = [found.title, found.model, now.system, *(each.text for each in now.summaries)]
    texts += [part for turn in now.turns for part in (turn.message.role, turn.message.content)]
    assert all(isinstance(each, str) and not each.startswith("b'") for each in (*texts, store.summaries()[0].title))
    assert any("\ufffd" in each for each in texts) == (column != "role")
    store.save(found)
