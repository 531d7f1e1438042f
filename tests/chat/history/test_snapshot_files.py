"""Where snapshots lie and which go."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from localq import cli, disk, places
from localq.chat.history import snapshot_files, snapshot_keeper
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import start
from localq.errors import ExitCode, LocalqError
from localq.settings import Settings
from tests.support.chat.stored_snapshots import names, own_folder, written


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    return own_folder(monkeypatch, tmp_path)


@pytest.fixture
def database() -> Path:
    return places.sessions_file()


def test_conversations_of_one_number_in_two_databases_have_two_files(folder, database, tmp_path):
    first, second = snapshot_files.snapshot_path(database, 7), snapshot_files.snapshot_path(tmp_path / "other.db", 7)
    assert first != second
    assert {first.parent, second.parent} == {folder}
    assert first.name.startswith("7-")
    assert first == snapshot_files.snapshot_path(database, 7) != snapshot_files.snapshot_path(database, 8)


def test_room_is_made_by_the_least_recently_used(database):
    paths = [written(snapshot_files.snapshot_path(database, id), 100, 1000 - id) for id in range(5)]
    snapshot_files.mark_used(paths[0])
    snapshot_files.make_room(snapshot_files.snapshot_path(database, 9), 150, 400)
    assert names() == {paths[id].name for id in (0, 4)}  # 1 to 3 went: 200 bytes and 150 are 400 at most
    snapshot_files.make_room(paths[0], 300, 400)  # its own place is free
    assert names() == {paths[id].name for id in (0, 4)}


def test_what_is_larger_than_all_may_be_removes_nothing(database):
    path = written(snapshot_files.snapshot_path(database, 1), 100, 50)
    with pytest.raises(LocalqError, match="snapshot not saved: the snapshot needs") as caught:
        snapshot_files.make_room(snapshot_files.snapshot_path(database, 2), 401, 400)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert names() == {path.name}


def test_a_full_disk_is_told_before_anything_is_written(database, monkeypatch):
    path = written(snapshot_files.snapshot_path(database, 1), 100, 50)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 500)
    with pytest.raises(
        LocalqError,
        match=r"snapshot not saved: not enough free disk space .*: 300 bytes plus .* only 500 bytes are free\.",
    ) as caught:
        snapshot_files.make_room(snapshot_files.snapshot_path(database, 2), 300, 10_000)
    assert caught.value.exit_code == ExitCode.DISK
    assert names() == {path.name}
    snapshot_files.make_room(snapshot_files.snapshot_path(database, 2), 250, 10_000)


def test_parts_of_dead_writers_go_and_those_of_living_ones_stay(folder, database):
    old, held = written(folder / "1-x.kv.abc.part", 10, 100), written(folder / "2-x.kv.abc.part", 10, 100)
    young = written(folder / "3-x.kv.abc.part", 10, 0)
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [each.path for each in snapshot_files.abandoned_parts()] == [old]
        snapshot_files.make_room(snapshot_files.snapshot_path(database, 2), 10, 1000)
        assert names() == {held.name, young.name}
    assert [each.path for each in snapshot_files.abandoned_parts()] == [held]


def test_a_removed_conversation_takes_its_snapshot_along(database, tmp_path):
    store, other = ConversationStore(), ConversationStore(tmp_path / "other.db")
    for each in (store, other):
        record = Record()
        record.conversation.add_user("hello")
        each.save(record)
    mine, theirs = (written(snapshot_files.snapshot_path(each.path, 1), 10, 5) for each in (store, other))
    store.delete(1)
    assert names() == {theirs.name}
    store.restore(1)
    assert store.ids() == {1}
    assert not mine.exists()


def test_prune_shows_and_removes_what_nothing_uses(folder, capsys):
    store = ConversationStore()
    record = Record()
    record.conversation.add_user("hello")
    store.save(record)
    here = written(snapshot_files.snapshot_path(store.path, 1), 1000, 10)
    gone = written(snapshot_files.snapshot_path(store.path, 2), 100, 5)
    part = written(folder / "1-x.kv.abc.part", 10, 100)
    assert cli.execute(["prune", "--dry-run", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["removed"]
    assert [(each["path"], each["bytes"], each["what"]) for each in listed] == [
        (str(part), 10, "unfinished snapshot"),
        (str(gone), 100, "snapshot of a deleted conversation"),
    ]
    assert names() == {here.name, gone.name, part.name}
    assert cli.execute(["prune", "-y"]) == 0
    assert names() == {here.name}


def test_prune_removes_all_where_none_are_wanted(monkeypatch, capsys):
    store = ConversationStore()
    written(snapshot_files.snapshot_path(store.path, 1), 1000, 10)
    store.path.parent.mkdir(parents=True)
    store.path.write_text("no database")  # what conversations there are is not known
    assert snapshot_keeper.unused_snapshots(Settings()) == []
    monkeypatch.setenv("LOCALQ_SNAPSHOTS", "off")
    assert cli.execute(["prune", "-y"]) == 0
    assert names() == set()
    assert "over the size limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"), [("off", 0), ("0", 0), ("4", 4 * 2**30), ("4GiB", 4 * 2**30), ("900MiB", 900 * 2**20)]
)
def test_the_setting_is_a_size_or_off(text, expected, database):
    assert snapshot_keeper.size_limit(Settings(snapshots=text)) == expected
    assert (snapshot_keeper.keeper(database, Settings(snapshots=text)) is None) == (expected == 0)


def test_a_setting_that_is_no_size_is_named():
    with pytest.raises(LocalqError, match="snapshots: 'much' is not a size") as caught:
        start(None, Settings(snapshots="much"), None, lambda line: None)
    assert caught.value.exit_code == ExitCode.USAGE


def test_what_is_not_saved_has_no_snapshots():
    assert start(None, Settings(save=False), None, lambda line: None).keeper is None
    assert start(None, Settings(snapshots="off"), None, lambda line: None).keeper is None
    assert start(None, Settings(), None, lambda line: None).keeper is not None
