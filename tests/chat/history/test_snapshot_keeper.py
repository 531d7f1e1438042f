"""Which conversation is written and brought back, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from localq import places
from localq.chat.history import snapshot_files
from localq.chat.history.record import Record
from localq.chat.history.snapshot_keeper import SnapshotKeeper
from localq.chat.history.store import ConversationStore
from localq.errors import ExitCode, LocalqError, bad_file
from localq.stats import Stats
from localq.worker.messages import Loaded
from tests.support.chat.stored_snapshots import DEATH, LONG, Engine, own_folder, written

LOADED = Loaded("m", "cpu", "CPU", "float32", "bf16", 2000, 256, False, 0.0, {"kv_cache": 2_000_000})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    return own_folder(monkeypatch, tmp_path)


@pytest.fixture
def database() -> Path:
    return places.sessions_file()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def keeper(database) -> SnapshotKeeper:
    return SnapshotKeeper(database, 2**30)


def test_a_long_conversation_is_written_when_it_is_left_and_comes_back(keeper, engine, folder):
    first, second = Record(id=1), Record(id=2)
    keeper.restore(engine, first, LOADED)
    keeper.record_reply(LONG)
    keeper.restore(engine, first, LOADED)  # the next reply in the same
    keeper.record_reply(LONG)
    assert engine.since() == []
    keeper.restore(engine, second, LOADED)
    assert engine.since() == [("save", "1")]
    keeper.restore(engine, Record(id=1), LOADED)  # read anew from the database: nothing was said in the second
    assert engine.since() == [("restore", "1")]
    keeper.save(engine)
    assert engine.since() == []  # nothing is new in it
    keeper.record_reply(LONG)
    keeper.save(engine)
    keeper.save(engine)
    assert engine.since() == [("save", "1")]
    assert keeper.take_notice() == ""


def test_after_a_new_load_the_cache_is_empty(keeper, engine):
    record = Record(id=1)
    keeper.restore(engine, record, LOADED)
    keeper.record_reply(LONG)
    keeper.save(engine)
    again = Loaded(**vars(LOADED))
    keeper.restore(engine, record, again)
    assert engine.since() == [("save", "1"), ("restore", "1")]
    keeper.restore(engine, record, again)
    assert engine.since() == []


@pytest.mark.parametrize(
    ("used", "prefill_s", "slot_bytes", "kept"),
    [(201, 4.0, 1000, True), (199, 4.0, 1000, False), (1000, 0.5, 1000, False),
     (300, 4.0, 1_000_000, True), (300, 4.0, 2_000_000, False)],
)  # fmt: skip
def test_what_is_read_again_nearly_as_fast_is_not_worth_a_file(keeper, engine, used, prefill_s, slot_bytes, kept):
    loaded = Loaded(**{**vars(LOADED), "ledger": {"kv_cache": slot_bytes * LOADED.context_size}})
    keeper.restore(engine, Record(id=1), loaded)
    keeper.record_reply(Stats("done", prefilled_tokens=800, prefill_s=prefill_s, context_used=used))
    keeper.save(engine)
    assert engine.since() == ([("save", "1")] if kept else [])


def test_many_short_prompts_do_not_hide_how_fast_the_first_was_read(keeper, engine):
    keeper.restore(engine, Record(id=1), LOADED)
    keeper.record_reply(Stats("done", prefilled_tokens=10_000, prefill_s=1.0, context_used=10_000))
    for _ in range(10):
        keeper.record_reply(Stats("done", prefilled_tokens=5, prefill_s=0.02, context_used=5_000))
    keeper.save(engine)
    assert engine.since() == []


def test_a_conversation_that_is_not_saved_is_not_written(keeper, engine):
    keeper.restore(engine, Record(), LOADED)
    keeper.record_reply(LONG)
    keeper.save(engine)
    assert engine.since() == []


def test_a_conversation_that_was_deleted_is_not_written(keeper, engine, database):
    store, record = ConversationStore(database), Record()
    record.conversation.add_user("hello")
    store.save(record)
    keeper.restore(engine, record, LOADED)
    keeper.record_reply(LONG)
    store.delete(record.id)
    keeper.save(engine)
    assert engine.since() == []


def test_a_conversation_that_is_deleted_while_it_is_written_leaves_no_file(keeper, engine, database, monkeypatch):
    store, record = ConversationStore(database), Record()
    record.conversation.add_user("hello")
    store.save(record)
    path = snapshot_files.snapshot_path(database, record.id)

    def save_cache(name: str) -> int:
        store.delete(record.id)
        written(Path(name), 10, 0)
        return 10

    monkeypatch.setattr(engine, "save_cache", save_cache)
    keeper.restore(engine, record, LOADED)
    keeper.record_reply(LONG)
    keeper.save(engine)
    assert not path.exists()


def test_a_dead_engine_is_asked_for_nothing(keeper, engine):
    keeper.restore(engine, Record(id=1), LOADED)
    keeper.record_reply(LONG)
    engine.alive = False
    keeper.save(engine)
    assert engine.since() == []


def test_what_is_not_used_is_told_once_and_damage_is_removed(keeper, engine, database):
    path = written(snapshot_files.snapshot_path(database, 1), 10, 5)
    engine.error = LocalqError("snapshot not used", "it was made with another format")
    keeper.restore(engine, Record(id=1), LOADED)
    assert keeper.take_notice() == "snapshot not used: it was made with another format."
    assert keeper.take_notice() == ""
    assert path.exists()  # another setting, or the next end of this chat, decides
    engine.error = bad_file("snapshot not used", "it is cut off")
    keeper.restore(engine, Record(id=1), Loaded(**vars(LOADED)))
    assert keeper.take_notice() == "snapshot not used: it is cut off."
    assert not path.exists()


def test_an_engine_that_dies_of_it_is_an_error_and_the_next_one_reads_anew(keeper, engine, database):
    written(snapshot_files.snapshot_path(database, 1), 10, 5)
    engine.error, engine.dies = DEATH, True
    with pytest.raises(LocalqError, match="SIGKILL"):
        keeper.restore(engine, Record(id=1), LOADED)
    engine.error, engine.alive = None, True
    engine.since()
    keeper.restore(engine, Record(id=1), LOADED)
    assert engine.since() == []


def test_a_reply_that_failed_leaves_nothing_to_write(keeper, engine, database):
    """The engine has forgotten all of it: room for it would be made at the cost of others."""
    keeper.restore(engine, Record(id=1), LOADED)
    keeper.record_reply(LONG)
    keeper.restore(engine, Record(id=1), LOADED)
    keeper.save(engine)
    assert engine.since() == []


def test_what_cannot_be_kept_is_told_and_ends_nothing(keeper, engine, database):
    keeper.restore(engine, Record(id=1), LOADED)
    for error in (LocalqError("/x", "the disk is full", "", ExitCode.DISK), DEATH):
        keeper.record_reply(LONG)
        engine.error = error
        keeper.save(engine)
        assert keeper.take_notice().startswith("snapshot not saved: ")
    small = SnapshotKeeper(database, 1000)
    small.restore(engine, Record(id=1), LOADED)
    small.record_reply(LONG)
    engine.since()
    small.save(engine)
    assert small.take_notice().startswith("snapshot not saved: the snapshot needs")
    assert engine.since() == []
