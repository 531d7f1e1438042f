"""What `disk` opens for writing: nothing that exists is emptied, no link is followed, an error leaves no file."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from io import BufferedRandom
from pathlib import Path

import pytest

from localq import disk
from localq.errors import ExitCode, LocalqError
from localq.files import own_files

KEPT = b"written by hand\n"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "authorized_keys"
    path.write_bytes(KEPT)
    return path


def fail_in(opened: AbstractContextManager[BufferedRandom]) -> None:
    """Write half of a file, and fail."""
    with opened as file:
        file.write(b"half")
        raise KeyError


def test_a_new_file_takes_no_name_that_is_used(tmp_path: Path, victim: Path) -> None:
    link, nowhere = tmp_path / "link", tmp_path / "nowhere"
    link.symlink_to(victim)
    nowhere.symlink_to(tmp_path / "not there")
    for path in (victim, link, nowhere, tmp_path):
        with pytest.raises(FileExistsError), disk.new_file(path):
            pass
    assert victim.read_bytes() == KEPT
    assert not (tmp_path / "not there").exists()
    with disk.new_file(tmp_path / "new") as file:
        file.write(b"1")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    with pytest.raises(KeyError):
        fail_in(disk.new_file(tmp_path / "failed"))
    assert not (tmp_path / "failed").exists()


def test_a_part_is_made_anew_and_stays(tmp_path: Path, victim: Path) -> None:
    part = tmp_path / "a.part"
    for make in (lambda: part.symlink_to(victim), lambda: os.link(victim, part), lambda: part.write_bytes(b"longer")):
        part.unlink(missing_ok=True)
        make()
        with disk.part_file(part) as file:
            file.write(b"1")
        assert (part.read_bytes(), part.is_symlink(), victim.read_bytes()) == (b"1", False, KEPT)
    with pytest.raises(KeyError), disk.part_file(part):
        raise KeyError
    assert part.exists()


def test_a_replacement_is_whole_or_nothing(tmp_path: Path, victim: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(victim)
    with pytest.raises(KeyError):
        fail_in(disk.replacement(victim))
    assert victim.read_bytes() == KEPT
    with disk.replacement(link, mode=0o640) as file:
        file.write(b"new")
        file.flush()
        assert link.read_bytes() == KEPT
    assert (link.read_bytes(), link.is_symlink(), victim.read_bytes()) == (b"new", False, KEPT)
    assert stat.S_IMODE(link.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authorized_keys", "link"]


def open_lock(path: Path) -> int:
    return own_files.open_own(path, os.O_RDWR | os.O_CREAT)


def test_locks_and_logs_keep_what_they_have(tmp_path: Path, victim: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(victim)
    os.mkfifo(pipe)
    for open_file in (open_lock, disk.open_to_append):
        os.close(open_file(victim))
        for path in (link, pipe, tmp_path):
            with pytest.raises(OSError):  # noqa: PT011 - of several numbers
                open_file(path)
        descriptor = open_file(tmp_path / open_file.__name__)
        os.write(descriptor, b"1")
        os.close(descriptor)
    assert victim.read_bytes() == KEPT


def test_a_temporary_file_is_private_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with disk.temporary_file("localq-", ".md", KEPT) as path:
        assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (KEPT, 0o600)
    assert not path.exists()


# ---- the file of an option


def test_an_output_keeps_what_it_has_until_something_is_written(tmp_path: Path, victim: Path) -> None:
    victim.chmod(0o600)
    output = disk.LazyOutput(victim)
    output.close()
    assert victim.read_bytes() == KEPT
    output = disk.LazyOutput(victim)
    output.write(b"1")
    output.write(b"2")
    assert victim.read_bytes() == b"12"  # at once
    output.close()
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    new = disk.LazyOutput(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    new.write(b"3")
    new.close()
    assert (tmp_path / "new").read_bytes() == b"3"


def test_an_output_that_cannot_be_written_keeps_what_it_has(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = disk.LazyOutput(victim)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LocalqError, match="the disk is full") as caught:
        output.write(b"1")
    assert caught.value.exit_code == ExitCode.DISK
    assert victim.read_bytes() == KEPT
    assert [path.name for path in victim.parent.iterdir()] == [victim.name]


def test_what_cannot_be_replaced_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    for path in (tmp_path, tmp_path / "none" / "file", tmp_path / "nowhere"):
        with pytest.raises(LocalqError) as caught:
            disk.LazyOutput(path)
        assert caught.value.exit_code == ExitCode.DISK
        assert str(path) in str(caught.value)
    assert not (tmp_path / "not there").exists()


def test_a_pipe_is_written_to_and_one_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(LocalqError, match="cannot write"):
        disk.LazyOutput(pipe).write(b"1")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    output = disk.LazyOutput(pipe)
    while True:  # until the reader is there
        try:
            output.write(b"1" * 100_000)
            break
        except LocalqError:
            continue
    output.close()
    reader.join()
    assert read == [b"1" * 100_000]


@pytest.mark.parametrize("name", ["/dev/stderr", "/dev/fd/2", "/proc/self/fd/2"])
def test_streams_that_the_shell_has_opened_are_written_to(tmp_path: Path, name: str) -> None:
    """A pipe, or a file, which has what was written to it before."""
    code = f"import pathlib; from localq import disk; o = disk.LazyOutput(pathlib.Path({name!r})); o.write(b'thought')"
    run = subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.PIPE, timeout=60)
    assert run.stderr == b"thought"
    log = tmp_path / "log"
    log.write_bytes(KEPT)
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", code], check=True, stderr=file, timeout=60)
        file.write(b"later")
    assert log.read_bytes() == KEPT + b"thoughtlater"


def test_a_device_is_written_to() -> None:
    output = disk.LazyOutput(Path("/dev/null"))
    assert not output.is_terminal
    output.write(b"1")
    output.close()
    with pytest.raises(LocalqError, match="the disk is full"):
        disk.LazyOutput(Path("/dev/full")).write(b"1")
