"""A cache that several users share: who may read what is written there, and what of others is left alone."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localq import disk, places
from localq.errors import ExitCode
from localq.files import checked_files, local_models
from localq.files.hub import client as hub_client
from localq.files.hub import download
from localq.files.hub import fetch as hub
from localq.files.hub import leftovers as hub_leftovers
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.hub.parts import Part
from tests.support.common import privileges
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, refused

NAME = "large.gguf"
CONTENT = random.Random(7).randbytes(200_000)
HASH = fake_hub.sha256(CONTENT)
OTHER_USER, OTHER_GROUP = 54321, 54322
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, fake_hub.model_files(shards=2))
        server.add("maker/large", {NAME: CONTENT})
        yield server


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def get() -> Path:
    listing = hub_client.list_files("maker/large", "main")
    return download.get(listing, listing.files[NAME])


def begin(count: int = 120_000) -> Path:
    """An interrupted download with its state; the part."""
    about = {"repo": "maker/large", "name": NAME, "size": len(CONTENT)}
    places.downloads_dir().mkdir(parents=True, exist_ok=True)
    with Part(places.downloads_dir() / HASH, HASH, about) as part:
        part.write(CONTENT[:count])
    return part.path


# ---- what others may read


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o027])
@pytest.mark.parametrize("beside", [False, True], ids=["home", "beside the weights"])
def test_everything_that_is_written_has_the_rights_that_umask_leaves(server, tmp_path, monkeypatch, mask, beside):
    if beside:
        monkeypatch.setattr(places, "_device", lambda folder: int("hub" in str(folder) or folder == tmp_path))
    with umask(mask):
        hub.fetch_repo(REPO)
        begin()
        hub.fetch_repo("maker/large")
        begin()
    wrong, seen = [], set()
    for path in tmp_path.rglob("*"):
        if not path.is_symlink():
            seen.add(path.relative_to(tmp_path).parts[0])
            right = (0o777 if path.is_dir() else 0o666) & ~mask
            wrong += [] if stat.S_IMODE(path.stat().st_mode) == right else [(path, oct(path.stat().st_mode))]
    assert wrong == []
    assert seen == {"hub", "data", ".localq-downloads" if beside else "cache"}


def test_a_part_that_was_begun_for_this_user_alone_ends_as_umask_says_now(server):
    with umask(0o077):
        begin()
    with umask(0o022):
        assert stat.S_IMODE(get().resolve().stat().st_mode) == 0o644


@as_root
def test_files_belong_to_the_group_of_the_cache(server):
    for folder in (places.hub_cache(), places.hub_cache() / "models--maker--tiny-model"):
        folder.mkdir(parents=True)
        os.chown(folder, -1, OTHER_GROUP)
        folder.chmod(0o2775)
    with umask(0o007):
        folder = hub.fetch_repo(REPO).parents[1]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_gid for path in files} == {OTHER_GROUP}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o660}


# ---- what is not adopted


def foreign(path: Path, mine: Path) -> None:
    os.chown(path, OTHER_USER, -1)


def linked(path: Path, mine: Path) -> None:
    path.unlink()
    path.symlink_to(mine)


def hard_linked(path: Path, mine: Path) -> None:
    path.unlink()
    path.hardlink_to(mine)


def piped(path: Path, mine: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def foldered(path: Path, mine: Path) -> None:
    path.unlink()
    path.mkdir()


KINDS = [pytest.param(foreign, marks=as_root), linked, hard_linked, piped, foldered]


@pytest.mark.parametrize("suffix", [".part", ".state", ".lock"])
@pytest.mark.parametrize("make", KINDS)
def test_what_another_user_put_there_is_neither_continued_nor_changed(server, tmp_path, suffix, make):
    mine = tmp_path / "mine"
    mine.write_text("years")
    part = begin()
    path = part.with_suffix(suffix)
    path.touch()
    make(path, mine)
    before = os.lstat(path)
    [file] = hub_client.list_files("maker/large", "main").files.values()
    listed = [each.path for each in local_models.unfinished_downloads().get("maker/large", [])]
    assert listed == ([part] if suffix == ".lock" else [])
    local_models.list_local()
    assert get().read_bytes() == CONTENT
    assert server.seen("GET", NAME)[-1].headers.get("range") is None  # from the beginning
    assert os.path.samestat(os.lstat(path), before)
    assert os.lstat(path).st_size == before.st_size
    assert mine.read_text() == "years"
    if suffix == ".part":
        assert download_parts.size_so_far(part.parent, file.content_id) == 0


@pytest.mark.parametrize("suffix", [".part", ".state", ".lock"])
def test_a_running_download_beside_a_name_that_is_taken_is_not_removed(server, tmp_path, suffix):
    mine = tmp_path / "mine"
    mine.write_text("years")
    folder = begin().parent
    taken = folder / f"{HASH}{suffix}"
    taken.unlink(missing_ok=True)
    taken.symlink_to(mine)
    about = {"repo": "maker/large", "name": NAME, "size": len(CONTENT)}
    with download_parts.claim(folder, HASH, lambda: None) as stem:
        assert stem.name != HASH
        with Part(stem, HASH, about) as part:
            part.write(CONTENT)
            running = next(each for each in download_parts.unfinished_parts(folder) if each.path == part.path)
            assert running.busy
            assert download_parts.remove(running) == 0  # as by a process that listed it before
            assert part.path.stat().st_size == len(CONTENT)
        assert not next(each for each in download_parts.unfinished_parts(folder) if each.path == part.path).busy
    assert download_parts.remove(running) == len(CONTENT)
    assert not running.path.exists()
    assert mine.read_text() == "years"


@as_root
def test_a_download_folder_of_another_user_is_not_used(server):
    part = begin()
    for path in (part.parent, *part.parent.iterdir()):
        os.chown(path, OTHER_USER, -1)
    before = {path.name: path.read_bytes() for path in part.parent.iterdir()}
    assert local_models.list_local() == []
    assert get().read_bytes() == CONTENT
    assert places.downloads_dir().name == "downloads-0"
    assert {path.name: path.read_bytes() for path in part.parent.iterdir()} == before
    os.chown(places.downloads_dir(), OTHER_USER, -1)  # planted by somebody who knows that name
    get().unlink()
    (places.hub_cache() / "models--maker--large" / "blobs" / HASH).unlink()
    error = refused(get)
    assert error.exit_code == ExitCode.DISK
    assert "belongs to another user" in str(error)


def test_a_part_that_is_exchanged_before_it_is_renamed_is_refused(server, monkeypatch):
    """Somebody who may write to the folder puts other bytes there after the right ones were hashed."""
    replace = os.replace

    def exchanged(source, target):
        if str(source).endswith(".part"):
            Path(source).unlink()
            Path(source).write_bytes(bytes(len(CONTENT)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", exchanged)
    assert refused(get).exit_code == ExitCode.BAD_FILE


# ---- what makes a file verified


def rewritten(path: Path) -> None:
    """Other bytes, and the time set back."""
    before = path.stat()
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def given(path: Path) -> None:
    """To another user, who may write to it from now on."""
    os.chown(path, OTHER_USER, -1)


def other_inode(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("change", [rewritten, pytest.param(given, marks=as_root), other_inode, Path.touch])
def test_a_changed_file_is_not_known(server, change: Callable[[Path], None]):
    store, blob = hub_records.users(), get().resolve()
    assert hub_records.is_known(store, "maker/large", HASH, blob)
    change(blob)
    assert not hub_records.is_known(store, "maker/large", HASH, blob)


@pytest.mark.parametrize("key", ["size", "mtime_ns", "ctime_ns", "inode", "uid"])
def test_a_record_without_one_of_its_fields_counts_as_none(server, key):
    store, blob = hub_records.users(), get().resolve()
    record = store.record("maker/large", HASH)
    record.write_text(record.read_text().replace(f'"{key}"', '"unknown"'))
    assert not hub_records.is_known(store, "maker/large", HASH, blob)


@pytest.mark.parametrize("make", KINDS)
def test_a_record_of_another_user_counts_as_none(server, tmp_path, make):
    store, blob = hub_records.users(), get().resolve()
    record = store.record("maker/large", HASH)
    mine = tmp_path / "mine"
    mine.write_bytes(record.read_bytes())
    make(record, mine)
    assert not hub_records.is_known(store, "maker/large", HASH, blob)
    assert not hub_records.is_ours(store, "maker/large", HASH, blob)
    assert hub_leftovers.find(lambda error: None) == []


# ---- what is closed to this user, where the hub can be asked


@pytest.mark.parametrize("what", ["", "snapshots", "blobs"])
def test_a_closed_repository_is_named_when_it_is_fetched(server, what):
    folder = hub.fetch_repo(REPO).parents[1]
    with privileges.closed(folder / what):
        error = refused(hub.fetch_repo, REPO)
    assert error.exit_code == ExitCode.DISK
    assert f"{REPO}: {folder}" in str(error)
    assert "cannot be read" in str(error)


def test_a_branch_that_only_another_user_may_read_is_asked_for_and_written_anew(server):
    folder = hub.fetch_repo(REPO)
    main = folder.parents[1] / "refs" / "main"
    main.chmod(0)
    with privileges.bound_by_rights():
        error = refused(hub.fetch_repo, REPO, offline=True)
        assert f"{REPO}: {main} cannot be read" in str(error)
        assert hub.fetch_repo(REPO) == folder
        assert hub.fetch_repo(REPO, offline=True) == folder


def test_a_pipe_in_place_of_a_branch_blocks_nothing(server):
    folder = hub.fetch_repo(REPO)
    piped(folder.parents[1] / "refs" / "main", folder)
    assert [each.path for each in local_models.list_local()] == [folder]
    assert refused(hub.fetch_repo, REPO, offline=True).exit_code == ExitCode.NETWORK


def test_files_are_read_again_though_no_record_can_be_written(server, monkeypatch):
    path = get()
    assert hub.wrong_files("maker/large", path, again=True) == []

    def refuse(path: Path, content: bytes, scratch: Path | None = None) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(disk, "write_durably", refuse)
    said: list[str] = []
    hub.wrong_files("maker/large", path, lambda what, done, total: said.append(what), again=True)
    assert f"checking {path.name}" in said
    blob = disk.resolve(path)
    spoil_unseen(monkeypatch, blob)
    assert hub.wrong_files("maker/large", path) == []
    assert hub.wrong_files("maker/large", path, again=True) == [path]


def test_content_that_was_wrong_once_is_hashed_before_its_next_use(server, monkeypatch):
    path = get()
    spoil_unseen(monkeypatch, disk.resolve(path))
    assert hub.wrong_files("maker/large", path, again=True) == [path]
    assert hub.wrong_files("maker/large", path) == [path]


def spoil_unseen(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Lose a bit as a disk does: no stamp shows it."""
    before = checked_files.stamp(path)
    with path.open("r+b") as file:
        file.write(bytes([CONTENT[0] ^ 1]))
    monkeypatch.setattr(checked_files, "stamp", lambda each: dict(before))


def test_a_file_that_is_replaced_while_it_is_hashed_is_hashed_again(tmp_path, monkeypatch):
    path, hashed = tmp_path / "file", []
    path.write_bytes(b"right")
    digest, has_content = disk.sha256_of(path), disk.has_content

    def replaced_meanwhile(path: Path, content_id: str) -> bool:
        hashed.append(path)
        found = has_content(path, content_id)
        if len(hashed) == 1:
            (tmp_path / "new").write_bytes(b"right")
            os.replace(tmp_path / "new", path)
        return found

    monkeypatch.setattr(disk, "has_content", replaced_meanwhile)
    assert checked_files.wrong_files(tmp_path, {"file": digest}, again=True) == []
    assert len(hashed) == 2
