"""A source whose files are on the disk a few at a time: whose folder that is, and what the hub may say of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.hub import client as hub_client
from localq.files.hub import shards as hub_shards
from tests.support.files import hub_server
from tests.support.files.fake_hub import COMMIT, FakeHub
from tests.support.files.hub_server import REPO
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    source = make_checkpoint(tmp_path / "checkpoint", "llama", shard_bytes=20_000)
    monkeypatch.setattr(hub_shards, "WAITS_S", (0.0,))
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, {path.name: path.read_bytes() for path in source.iterdir()})
        yield server


def test_a_folder_of_somebody_else_is_refused_and_left(hub, tmp_path):
    mine = tmp_path / "out.source" / "thesis.tex"
    mine.parent.mkdir()
    mine.write_text("years")
    with pytest.raises(LocalqError, match="it already exists and was not created by localq") as caught:
        hub_shards.open_shards(hub_server.source(), tmp_path / "out.source")
    assert caught.value.exit_code == ExitCode.USAGE
    assert mine.read_text() == "years"
    assert not hub.seen("GET", ".safetensors")


def linked(mark: Path, mine: Path) -> None:
    mark.symlink_to(mine)


def of_another_user(mark: Path, mine: Path) -> None:
    mark.touch()
    for path in (mark, mark.parent):
        os.chown(path, 54321, -1)


@pytest.mark.parametrize(
    "make",
    [
        linked,
        pytest.param(
            of_another_user, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
        ),
    ],
)
def test_a_folder_that_another_user_prepared_is_refused(hub, tmp_path, make):
    mine, mark = tmp_path / "mine", tmp_path / "out.source" / hub_shards.MARK
    mine.write_text("years")
    mark.parent.mkdir()
    make(mark, mine)
    with pytest.raises(LocalqError, match="belongs to another user") as caught:
        hub_shards.open_shards(hub_server.source(), tmp_path / "out.source")
    assert caught.value.exit_code == ExitCode.USAGE
    assert mine.read_text() == "years"
    assert [path.name for path in mark.parent.iterdir()] == [hub_shards.MARK]


def test_two_at_a_time_do_not_share_a_folder(hub, tmp_path):
    first = hub_shards.open_shards(hub_server.source(), tmp_path / "out.source")
    with pytest.raises(LocalqError, match="another localq"):
        hub_shards.open_shards(hub_server.source(), tmp_path / "out.source")
    assert first is not None
    first.close(done=True)
    assert not (tmp_path / "out.source").exists()


def test_what_the_catalogue_records_is_what_is_fetched(hub, tmp_path):
    name = sorted(name for name in hub.repos[REPO].commits[COMMIT] if name.endswith(".safetensors"))[1]
    with pytest.raises(LocalqError, match=f"hash of {name} on the hub differs") as caught:
        hub_shards.open_shards(hub_server.source(sha256={name: "0" * 64}), tmp_path / "out.source")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert not (tmp_path / "out.source").exists()


@pytest.mark.parametrize("size", [2**62, 2**64])
def test_a_size_that_no_file_has(hub, tmp_path, monkeypatch, size):
    shards = hub_shards.open_shards(hub_server.source(), tmp_path / "out.source")
    assert shards is not None
    file = shards._listing.files[shards.names[0]]
    monkeypatch.setattr(hub_client, "first_bytes", lambda listing, asked, count: b"\x02" + bytes(7) + b"{}")
    with pytest.raises(
        LocalqError,
        match=rf"{file.name} \({size:,} bytes\) is too large for this file system\. Use another",
    ):
        shards._header(hub_client.RemoteFile(file.name, size, file.sha256, file.git_sha1))
    shards.close(done=True)


def test_a_full_folder_for_temporary_files_is_not_taken_for_the_repositorys_fault(hub, tmp_path, monkeypatch):
    shards = hub_shards.open_shards(hub_server.source(), tmp_path / "out.source")
    assert shards is not None

    system = os.open

    def full(path, flags, *rest, **options):
        if Path(os.fsdecode(path)).name in shards.names and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return system(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(LocalqError, match="disk is full") as caught:
        shards.headers()
    assert caught.value.exit_code == ExitCode.DISK
    shards.close(done=True)


def test_a_header_that_was_another_is_named(hub, tmp_path):
    shards = hub_shards.open_shards(hub_server.source(), tmp_path / "out.source")
    assert shards is not None
    headers = shards.headers()
    one, two = shards.names[:2]
    headers[one] = headers[two]
    with pytest.raises(LocalqError, match=f"the tensors in {one} do not match the header"):
        shards.path(one)
    shards.close(done=True)
