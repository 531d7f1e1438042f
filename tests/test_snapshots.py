"""Where snapshots lie and which go; which conversation is written and brought back, and what a chat tells of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path

import pytest
import tiny_checkpoints
from scripted_client import CharTokenizer, ScriptedClient

from localq import cli, disk, places, snapshot_keeper, snapshots
from localq.chat import ChatSession, Piece, Reply
from localq.cli import line_chat
from localq.cli.session import TerminalWatcher
from localq.errors import ExitCode, LocalqError, bad_file
from localq.opening import Opened
from localq.resuming import start
from localq.session_record import Session
from localq.sessions import SessionStore
from localq.settings import Settings
from localq.snapshot_keeper import SnapshotKeeper
from localq.stats import Stats
from localq.worker.client import EngineClient
from localq.worker.messages import Generate, Load, Loaded, Tokens

LONG = Stats("done", prompt_tokens=900, prefilled_tokens=800, prefill_s=4.0, context_used=1000, context_size=2000)
LOADED = Loaded("m", "cpu", "CPU", "float32", "bf16", 2000, 256, False, 0.0, {"kv_cache": 2_000_000})
DEATH = LocalqError("engine process", "ended (signal SIGKILL)")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    for name in ("LOCALQ_CACHE", "LOCALQ_DATA", "LOCALQ_CONFIG", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path / "LOCALQ_CACHE" / "sessions"


@pytest.fixture
def database() -> Path:
    return places.sessions_file()


def written(path: Path, size: int, age_s: float) -> Path:
    """A file that was used so many seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    used_s = time.time() - age_s
    os.utime(path, (used_s, used_s))
    return path


def names() -> set[str]:
    return set(os.listdir(places.snapshots_dir()))


# ---- files


def test_conversations_of_one_number_in_two_databases_have_two_files(folder, database, tmp_path):
    first, second = snapshots.path_of(database, 7), snapshots.path_of(tmp_path / "other.db", 7)
    assert first != second
    assert {first.parent, second.parent} == {folder}
    assert first.name.startswith("7-")
    assert first == snapshots.path_of(database, 7) != snapshots.path_of(database, 8)


def test_room_is_made_by_the_least_recently_used(database):
    paths = [written(snapshots.path_of(database, id), 100, 1000 - id) for id in range(5)]
    snapshots.used(paths[0])
    snapshots.make_room(snapshots.path_of(database, 9), 150, 400)
    assert names() == {paths[id].name for id in (0, 4)}  # 1 to 3 went: 200 bytes and 150 are 400 at most
    snapshots.make_room(paths[0], 300, 400)  # its own place is free
    assert names() == {paths[id].name for id in (0, 4)}


def test_what_is_larger_than_all_may_be_removes_nothing(database):
    path = written(snapshots.path_of(database, 1), 100, 50)
    with pytest.raises(LocalqError, match="snapshot not kept: it takes") as caught:
        snapshots.make_room(snapshots.path_of(database, 2), 401, 400)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert names() == {path.name}


def test_a_full_disk_is_told_before_anything_is_written(database, monkeypatch):
    path = written(snapshots.path_of(database, 1), 100, 50)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 500)
    with pytest.raises(LocalqError, match=r"snapshot not kept: .* 500 bytes are free") as caught:
        snapshots.make_room(snapshots.path_of(database, 2), 300, 10_000)
    assert caught.value.exit_code == ExitCode.DISK
    assert names() == {path.name}
    snapshots.make_room(snapshots.path_of(database, 2), 250, 10_000)


def test_parts_of_dead_writers_go_and_those_of_living_ones_stay(folder, database):
    old, held = written(folder / "1-x.kv.abc.part", 10, 100), written(folder / "2-x.kv.abc.part", 10, 100)
    young = written(folder / "3-x.kv.abc.part", 10, 0)
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [each.path for each in snapshots.abandoned()] == [old]
        snapshots.make_room(snapshots.path_of(database, 2), 10, 1000)
        assert names() == {held.name, young.name}
    assert [each.path for each in snapshots.abandoned()] == [held]


def test_a_removed_conversation_takes_its_snapshot_along(database, tmp_path):
    store, other = SessionStore(), SessionStore(tmp_path / "other.db")
    for each in (store, other):
        record = Session()
        record.conversation.say("hello")
        each.save(record)
    mine, theirs = (written(snapshots.path_of(each.path, 1), 10, 5) for each in (store, other))
    store.delete(1)
    assert names() == {theirs.name}
    store.restore(1)
    assert store.ids() == {1}
    assert not mine.exists()


def test_prune_shows_and_removes_what_nothing_uses(folder, capsys):
    store = SessionStore()
    record = Session()
    record.conversation.say("hello")
    store.save(record)
    here = written(snapshots.path_of(store.path, 1), 1000, 10)
    gone = written(snapshots.path_of(store.path, 2), 100, 5)
    part = written(folder / "1-x.kv.abc.part", 10, 100)
    assert cli.execute(["prune", "--dry-run", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["removed"]
    assert [(each["path"], each["bytes"], each["what"]) for each in listed] == [
        (str(part), 10, "unfinished snapshot"),
        (str(gone), 100, "snapshot of a conversation that is gone"),
    ]
    assert names() == {here.name, gone.name, part.name}
    assert cli.execute(["prune", "-y"]) == 0
    assert names() == {here.name}


def test_prune_removes_all_where_none_are_wanted(monkeypatch, capsys):
    store = SessionStore()
    written(snapshots.path_of(store.path, 1), 1000, 10)
    store.path.parent.mkdir(parents=True)
    store.path.write_text("no database")  # what conversations there are is not known
    assert snapshot_keeper.unused(Settings()) == []
    monkeypatch.setenv("LOCALQ_SNAPSHOTS", "off")
    assert cli.execute(["prune", "-y"]) == 0
    assert names() == set()
    assert "beyond the size allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"), [("off", 0), ("0", 0), ("4", 4 * 2**30), ("4GiB", 4 * 2**30), ("900MiB", 900 * 2**20)]
)
def test_the_setting_is_a_size_or_off(text, expected, database):
    assert snapshot_keeper.allowed(Settings(snapshots=text)) == expected
    assert (snapshot_keeper.keeper(database, Settings(snapshots=text)) is None) == (expected == 0)


def test_a_setting_that_is_no_size_is_named():
    with pytest.raises(LocalqError, match="snapshots: 'much' is not a size") as caught:
        start(None, Settings(snapshots="much"), None, lambda line: None)
    assert caught.value.exit_code == ExitCode.USAGE


def test_what_is_not_saved_has_no_snapshots():
    assert start(None, Settings(save=False), None, lambda line: None).keeper is None
    assert start(None, Settings(snapshots="off"), None, lambda line: None).keeper is None
    assert start(None, Settings(), None, lambda line: None).keeper is not None


# ---- when


class Engine:
    """The calls that reach the engine, by the number of the conversation."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.alive = True
        self.error: LocalqError | None = None
        self.dies = False

    def save_cache(self, path: str) -> int:
        return self._called("save", path)

    def restore_cache(self, path: str) -> int:
        return self._called("restore", path)

    def _called(self, what: str, path: str) -> int:
        self.calls.append((what, Path(path).name.partition("-")[0]))
        if self.error is not None:
            self.alive = not self.dies
            raise self.error
        if what == "save":
            written(Path(path), 10, 0)
        return 10

    def since(self) -> list[tuple[str, str]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def keeper(database) -> SnapshotKeeper:
    return SnapshotKeeper(database, 2**30)


def test_a_long_conversation_is_written_when_it_is_left_and_comes_back(keeper, engine, folder):
    first, second = Session(id=1), Session(id=2)
    keeper.take_up(engine, first, LOADED)
    keeper.replied(LONG)
    keeper.take_up(engine, first, LOADED)  # the next reply in the same
    keeper.replied(LONG)
    assert engine.since() == []
    keeper.take_up(engine, second, LOADED)
    assert engine.since() == [("save", "1")]
    keeper.take_up(engine, Session(id=1), LOADED)  # read anew from the database: nothing was said in the second
    assert engine.since() == [("restore", "1")]
    keeper.leave(engine)
    assert engine.since() == []  # nothing is new in it
    keeper.replied(LONG)
    keeper.leave(engine)
    keeper.leave(engine)
    assert engine.since() == [("save", "1")]
    assert keeper.told() == ""


def test_after_a_new_load_the_cache_is_empty(keeper, engine):
    record = Session(id=1)
    keeper.take_up(engine, record, LOADED)
    keeper.replied(LONG)
    keeper.leave(engine)
    again = Loaded(**vars(LOADED))
    keeper.take_up(engine, record, again)
    assert engine.since() == [("save", "1"), ("restore", "1")]
    keeper.take_up(engine, record, again)
    assert engine.since() == []


@pytest.mark.parametrize(
    ("used", "prefill_s", "slot_bytes", "kept"),
    [(201, 4.0, 1000, True), (199, 4.0, 1000, False), (1000, 0.5, 1000, False),
     (300, 4.0, 1_000_000, True), (300, 4.0, 2_000_000, False)],
)  # fmt: skip
def test_what_is_read_again_nearly_as_fast_is_not_worth_a_file(keeper, engine, used, prefill_s, slot_bytes, kept):
    loaded = Loaded(**{**vars(LOADED), "ledger": {"kv_cache": slot_bytes * LOADED.context_size}})
    keeper.take_up(engine, Session(id=1), loaded)
    keeper.replied(Stats("done", prefilled_tokens=800, prefill_s=prefill_s, context_used=used))
    keeper.leave(engine)
    assert engine.since() == ([("save", "1")] if kept else [])


def test_many_short_prompts_do_not_hide_how_fast_the_first_was_read(keeper, engine):
    keeper.take_up(engine, Session(id=1), LOADED)
    keeper.replied(Stats("done", prefilled_tokens=10_000, prefill_s=1.0, context_used=10_000))
    for _ in range(10):
        keeper.replied(Stats("done", prefilled_tokens=5, prefill_s=0.02, context_used=5_000))
    keeper.leave(engine)
    assert engine.since() == []


def test_a_conversation_that_is_not_saved_is_not_written(keeper, engine):
    keeper.take_up(engine, Session(), LOADED)
    keeper.replied(LONG)
    keeper.leave(engine)
    assert engine.since() == []


def test_a_conversation_that_was_deleted_is_not_written(keeper, engine, database):
    store, record = SessionStore(database), Session()
    record.conversation.say("hello")
    store.save(record)
    keeper.take_up(engine, record, LOADED)
    keeper.replied(LONG)
    store.delete(record.id)
    keeper.leave(engine)
    assert engine.since() == []


def test_a_conversation_that_is_deleted_while_it_is_written_leaves_no_file(keeper, engine, database, monkeypatch):
    store, record = SessionStore(database), Session()
    record.conversation.say("hello")
    store.save(record)
    path = snapshots.path_of(database, record.id)

    def save_cache(name: str) -> int:
        store.delete(record.id)
        written(Path(name), 10, 0)
        return 10

    monkeypatch.setattr(engine, "save_cache", save_cache)
    keeper.take_up(engine, record, LOADED)
    keeper.replied(LONG)
    keeper.leave(engine)
    assert not path.exists()


def test_a_dead_engine_is_asked_for_nothing(keeper, engine):
    keeper.take_up(engine, Session(id=1), LOADED)
    keeper.replied(LONG)
    engine.alive = False
    keeper.leave(engine)
    assert engine.since() == []


def test_what_is_not_used_is_told_once_and_damage_is_removed(keeper, engine, database):
    path = written(snapshots.path_of(database, 1), 10, 5)
    engine.error = LocalqError("snapshot not used", "it was made with another format")
    keeper.take_up(engine, Session(id=1), LOADED)
    assert keeper.told() == "snapshot not used: it was made with another format."
    assert keeper.told() == ""
    assert path.exists()  # another setting, or the next end of this chat, decides
    engine.error = bad_file("snapshot not used", "it is cut off")
    keeper.take_up(engine, Session(id=1), Loaded(**vars(LOADED)))
    assert keeper.told() == "snapshot not used: it is cut off."
    assert not path.exists()


def test_an_engine_that_dies_of_it_is_an_error_and_the_next_one_reads_anew(keeper, engine, database):
    written(snapshots.path_of(database, 1), 10, 5)
    engine.error, engine.dies = DEATH, True
    with pytest.raises(LocalqError, match="SIGKILL"):
        keeper.take_up(engine, Session(id=1), LOADED)
    engine.error, engine.alive = None, True
    engine.since()
    keeper.take_up(engine, Session(id=1), LOADED)
    assert engine.since() == []


def test_a_reply_that_failed_leaves_nothing_to_write(keeper, engine, database):
    """The engine has forgotten all of it: room for it would be made at the cost of others."""
    keeper.take_up(engine, Session(id=1), LOADED)
    keeper.replied(LONG)
    keeper.take_up(engine, Session(id=1), LOADED)
    keeper.leave(engine)
    assert engine.since() == []


def test_what_cannot_be_kept_is_told_and_ends_nothing(keeper, engine, database):
    keeper.take_up(engine, Session(id=1), LOADED)
    for error in (LocalqError("/x", "the disk is full", "", ExitCode.DISK), DEATH):
        keeper.replied(LONG)
        engine.error = error
        keeper.leave(engine)
        assert keeper.told().startswith("snapshot not kept: ")
    small = SnapshotKeeper(database, 1000)
    small.take_up(engine, Session(id=1), LOADED)
    small.replied(LONG)
    engine.since()
    small.leave(engine)
    assert small.told().startswith("snapshot not kept: it takes")
    assert engine.since() == []


# ---- in a chat


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
    return next(part for part in parts if not isinstance(part, Piece))


def test_a_chat_writes_what_it_leaves_and_takes_up_what_it_goes_on_with():
    client, store = KeepingClient(["one"], ["two"], ["three"]), SessionStore()
    session = ChatSession(client, Load("path", "model"), CharTokenizer(), store=store)
    session.keeper = SnapshotKeeper(store.path, 2**30)
    told_by(session.ask("a"))
    session.go_on(Session())
    assert client.engine.since() == []  # nothing has taken its place so far
    told_by(session.ask("b"))
    assert client.engine.since() == [("save", "1")]
    session.go_on(store.load(1))
    client.engine.error = LocalqError("snapshot not used", "it was made with another format")
    assert told_by(session.ask("c")).text == "three"
    assert client.engine.since() == [("save", "2"), ("restore", "1")]
    assert session.keeper.told().startswith("snapshot not")
    client.engine.error = None
    session.leave()
    assert client.engine.since() == [("save", "1")]


@pytest.mark.parametrize("failure", [None, LocalqError("engine", "it ran out of memory")])
def test_what_was_written_before_something_else_was_read_comes_back(failure):
    client, store = KeepingClient(["one"], [failure or "besides"], ["two"]), SessionStore()
    session = ChatSession(client, Load("path", "model"), CharTokenizer(), store=store)
    session.keeper = SnapshotKeeper(store.path, 2**30)
    told_by(session.ask("a"))
    with contextlib.suppress(LocalqError):
        told_by(session.aside("sum it up", 9))
    client.alive = True  # the error ends the scripted engine, and not the real one
    told_by(session.ask("b"))
    assert client.engine.since() == [("save", "1"), ("restore", "1")]


def test_a_chat_without_a_keeper_leaves_at_once():
    session = ChatSession(KeepingClient(), Load("path", "model"), CharTokenizer())
    session.leave()
    assert session.client.engine.since() == []


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyboardInterrupt(), ""), (DEATH, f"[snapshot not kept: {DEATH}]\n")],
    ids=["Ctrl-C", "a failure"],
)
def test_the_line_chat_ends_whatever_becomes_of_the_snapshot(error, told, capsys):
    client, store = KeepingClient(["one"]), SessionStore()
    session = ChatSession(client, Load("path", "model"), CharTokenizer(), store=store)
    session.keeper = SnapshotKeeper(store.path, 2**30)
    told_by(session.ask("a"))
    client.engine.error = error
    line_chat._leave(Opened(session, client), TerminalWatcher(), True)
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
    from localq.modelfiles import open_model
    from localq.tokenizer import Tokenizer

    monkeypatch.setattr(snapshot_keeper, "WORTH_S", -1.0)
    checkpoint = tiny_checkpoints.make_checkpoint(tmp_path / "model")
    store, tokenizer = SessionStore(), Tokenizer.load(open_model(checkpoint))
    path, found = snapshots.path_of(store.path, 1), []
    for name in ("writes", "restores"):
        with Recording() as client:
            session = ChatSession(client, Load(str(checkpoint), "m", "cpu"), tokenizer, max_tokens=12, store=store)
            session.keeper = SnapshotKeeper(store.path, 2**30)
            if name == "writes":
                told_by(session.ask("Remember " + "many words " * 12))
                session.leave()
                assert path.exists()
            else:
                session.record = store.load(1)
                session.conversation.head = 1
            stats = told_by(session.ask("And then?")).stats
            found.append((client.ids, stats.cached_tokens, stats.prompt_tokens))
            assert session.keeper.told() == ""
    assert found[0] == found[1]
    assert found[0][1] > 100
    assert len(found[0][0]) > 0
