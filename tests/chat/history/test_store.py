"""Conversations on disk: they come back as they were, are found, renamed, deleted and restored."""

from __future__ import annotations

import os
import time

import pytest

from localq.chat.history.conversation import Conversation, Message
from localq.chat.history.record import ChatSettings, Record
from localq.chat.history.store import MOST_SEARCHED, ConversationStore
from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling
from tests.support.chat.stored_conversations import STATS, talk


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    return ConversationStore(tmp_path / "data" / "sessions.db")


def test_everything_comes_back(store):
    session = talk("Grüße \0\U0001f600", "half", "org/model@nf4")
    session.conversation.system = "Be brief."
    session.settings = ChatSettings(Sampling(0.7, 40, seed=3), 100, ("###", "\n\n"))
    store.save(session)
    session.conversation.add(Message("assistant", "cut", complete=False), 0, STATS)  # a branch
    session.conversation.edit_user("unanswered", 0)
    store.save(session)
    found = store.load(session.id)
    assert found == Record(
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


def test_ten_thousand_stored_turns_do_not_slow_the_start(store):
    for number in range(100):
        session = Record(Conversation(), "tiny", f"talk {number}")
        for turn in range(50):
            session.conversation.add(
                Message("assistant", "y" * 300), session.conversation.add_user(f"{turn} " + "x" * 200)
            )
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


@pytest.mark.parametrize("character", ["a", "%", "_", "\\", "\U0001f600", "'"])
def test_a_text_to_search_for_has_a_limit_below_that_of_the_database(store, character):
    session = talk(character * MOST_SEARCHED, "an answer", "m")
    store.save(session)
    assert [each.id for each in store.summaries(character * MOST_SEARCHED)] == [session.id]
    for length in (MOST_SEARCHED + 1, 100_000):
        with pytest.raises(LocalqError, match="limit: 1,000 characters") as caught:
            store.summaries(character * length)
        assert caught.value.exit_code == ExitCode.USAGE
