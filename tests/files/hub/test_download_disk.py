"""Disks that are full, slow to say so, not ours, or gone: a cause, and nothing lost that was fetched (D8, D9)."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from localq import places
from localq.errors import ExitCode, LocalqError
from localq.files.hub import cache as hub_cache
from localq.files.hub import fetch as hub
from localq.files.hub import parts as download_parts
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, refused

NAME = "tiny.gguf"
CONTENT = random.Random(5).randbytes(400_000)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, {NAME: CONTENT})
        monkeypatch.setattr(download_parts, "STEP_BYTES", 100_000)
        yield server


@pytest.mark.parametrize("operation", ["write", "fsync", "replace", "symlink", "ftruncate", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_moment_is_named_and_the_next_run_goes_on(server, monkeypatch, operation, number):
    """The nth operation of a kind fails, for every n that there is; and all after it, as on a full disk."""
    kind, fails_from, failed = getattr(os, operation), 0, True
    while failed:
        left, failed = fails_from, False

        def failing(*given, **options):
            nonlocal left, failed
            left -= 1
            if left < 0:
                failed = True
                raise OSError(number, os.strerror(number))
            return kind(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, failing)
            if not _fetched(server):
                assert failed
        for blob in (hub_cache.repo_folder(REPO) / "blobs").glob("*"):
            assert blob.read_bytes() == CONTENT
        assert hub.fetch_repo(REPO).read_bytes() == CONTENT
        for folder in ("hub", "data", "cache"):
            subprocess.run(["rm", "-rf", str(places.hub_cache().parent / folder)], check=True)
        fails_from += 1
    assert fails_from >= 2


def _fetched(server) -> bool:
    try:
        hub.fetch_repo(REPO)
    except LocalqError as error:
        return error.exit_code != ExitCode.DISK
    return True


def test_what_came_before_the_disk_was_full_is_not_fetched_again(server, monkeypatch):
    write, room = os.write, 250_000

    def full(descriptor, content):
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= len(content)
        return write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        error = refused(hub.fetch_repo, REPO)
    assert "the disk is full" in str(error)
    assert "bytes needed" in str(error)
    assert "free. Free some space" in str(error)
    hub.fetch_repo(REPO)
    begin = server.seen("GET", f"/{NAME}")[-1].headers["range"]
    there = int(begin.removeprefix("bytes=").rstrip("-"))
    assert there >= download_parts.STEP_BYTES  # not all of it: a full disk takes no state either


def test_a_limit_on_the_size_of_files_is_a_full_disk(server):
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; from localq.cli import execute; sys.exit(execute(['pull', {REPO!r}]))"],
        capture_output=True, text=True, cwd=ROOT, check=False, timeout=60, env=dict(os.environ),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, 250_000)),
    )  # fmt: skip
    assert result.returncode == ExitCode.DISK
    assert "the disk is full" in result.stderr
    assert "Traceback" not in result.stderr
    assert hub.fetch_repo(REPO).read_bytes() == CONTENT


def test_only_what_is_missing_must_find_room(server, monkeypatch):
    server.fail(f"/{NAME}", cut_after=350_000)
    server.fail(f"/{NAME}", 403)
    refused(hub.fetch_repo, REPO)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * 50_000 - 1))
    error = refused(hub.fetch_repo, REPO)
    assert error.exit_code == ExitCode.DISK
    assert "50,000 bytes" in str(error)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * 50_000))
    assert hub.fetch_repo(REPO).read_bytes() == CONTENT


def test_a_cache_on_another_disk_has_its_downloads_there(server, tmp_path, monkeypatch):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk only")
    assert places.downloads_dir() == tmp_path / "cache" / "downloads"
    home = other / f"localq-test-{os.getpid()}"
    (home / "hub").mkdir(parents=True)
    try:
        monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
        assert hub.fetch_repo(REPO).read_bytes() == CONTENT
        assert places.downloads_dir() == home / ".localq-downloads"
        assert list(places.downloads_dir().iterdir()) == []
        assert [path.name for path in (home / "hub").iterdir()] == [hub_cache.repo_folder(REPO).name]
        assert not (tmp_path / "cache").exists()
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)


def test_a_small_model_takes_no_more_than_it_needs(server):
    server.add(REPO, fake_hub.model_files())
    hub.fetch_repo(REPO)
    left = [path for path in places.downloads_dir().rglob("*") if path.is_file()]
    assert left == []
