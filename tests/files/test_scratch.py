"""Temporary folders: what killed processes leave is removed, what is used or foreign stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.files import scratch

ROOT = Path(__file__).parents[2]
PREFIXES = ("localq-outline-", "localq-index-", "localq-header-")
HOLDER = """
import sys, time
from localq.files.scratch import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    (folder / "part").write_bytes(bytes(5000))
    print(folder, flush=True)
    time.sleep(300)
"""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def holder(prefix: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a scratch folder, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, prefix], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout:
        return process, Path(process.stdout.readline().strip())


@pytest.fixture
def killed() -> list[Path]:
    """The folders of killed processes, one of each prefix, and of a process before names had its id."""
    holders = [holder(prefix) for prefix in PREFIXES]
    for process, _ in holders:
        process.send_signal(signal.SIGKILL)
        process.wait()
    folders = [folder for _, folder in holders]
    assert all(each.exists() for each in folders)
    return [*folders, Path(tempfile.mkdtemp(prefix=PREFIXES[0]))]


def test_every_prefix_in_use_is_known():
    used = {
        line.split('"')[1]
        for path in (ROOT / "localq").rglob("*.py")
        for line in path.read_text().splitlines()
        if 'scratch_folder("' in line
    }
    assert used == set(PREFIXES)


def test_a_folder_ends_with_its_context(place):
    with scratch.scratch_folder(PREFIXES[0]) as folder:
        assert folder.parent == place
        assert scratch.find() == []
    assert not folder.exists()


def test_the_next_folder_removes_those_of_killed_processes(killed):
    with scratch.scratch_folder("localq-header-"):
        assert [each for each in killed if each.exists()] == []


def test_any_next_command_removes_them(killed):
    subprocess.run([sys.executable, "-m", "localq", "--version"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert [each for each in killed if each.exists()] == []


def test_any_next_command_looks_where_they_are_made(killed, place):
    """TMPDIR may name a folder that is not there; then another variable counts."""
    environment = {**os.environ, "TMPDIR": str(place / "none"), "TEMP": str(place)}
    command = [sys.executable, "-m", "localq", "--version"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment)
    assert [each for each in killed if each.exists()] == []


def test_prune_lists_and_removes_them(killed, capsys):
    assert execute(["prune", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert all(str(each) in said for each in killed)
    assert "temporary folder left by a killed process" in said
    assert execute(["prune", "--yes"]) == 0
    assert [each for each in killed if each.exists()] == []


def test_what_is_in_use_or_foreign_stays(place):
    process, used = holder(PREFIXES[0])
    try:
        for name in ("localq-outlines", "other-outline-1", "localq-case-1"):
            (place / name).mkdir()
        (place / "localq-index-file").write_text("a file")
        (place / "elsewhere").mkdir()
        (place / "localq-header-link").symlink_to(place / "elsewhere")
        before = sorted(place.iterdir())
        scratch.remove_abandoned(place)
        assert sorted(place.iterdir()) == before
        assert scratch.find() == []
        os.kill(process.pid, signal.SIGSTOP)  # a stopped process runs on later
        scratch.remove_abandoned(place)
        assert used.exists()
    finally:
        process.kill()
        process.wait()


def written(place: Path, name: str = "") -> Path:
    """A text as `disk.temporary_file` makes it; name: what it is called instead."""
    descriptor, made = tempfile.mkstemp(prefix="localq-", suffix=".md", dir=place)
    os.write(descriptor, b"a letter")
    os.close(descriptor)
    return Path(made).rename(place / name) if name else Path(made)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640])
def test_what_a_user_calls_by_such_a_name_stays(place, mode):
    """The names are localq's, but the names after them, or the modes, are not those that it gives."""
    names = ["notes", "my_notes_2", "OUTLINES", "a"] + (["feedback"] if mode != 0o600 else [])
    for name in names:
        written(place, f"localq-{name}.md").chmod(mode)
        os.utime(place / f"localq-{name}.md", (1, 1))
        for prefix in PREFIXES:
            (place / f"{prefix}{name}").mkdir(mode=mode | 0o100 * bool(mode & 0o400) | 0o011 * bool(mode & 0o044))
            (place / f"{prefix}{name}" / "work").write_text("of weeks")
    before = sorted(place.rglob("*"))
    assert scratch.find() == []
    assert execute(["prune", "--yes"]) == 0
    assert sorted(place.rglob("*")) == before


def test_a_text_of_an_editor_is_removed_by_prune_alone_after_a_day(place, capsys):
    fresh, old = written(place), written(place)
    os.utime(old, (time.time() - 90_000,) * 2)
    scratch.remove_abandoned(place)
    assert [each.path for each in scratch.find()] == [old]
    assert execute(["prune", "--yes"]) == 0
    assert "leftover editor text" in capsys.readouterr().err
    assert (fresh.exists(), old.exists()) == (True, False)


def test_a_text_that_cannot_be_removed_frees_nothing(place):
    path = place / "localq-abcd.md"
    path.mkdir()  # in its place by now
    assert scratch.Scrap(path, 8, scratch.UNSAVED).remove() == 0
    assert scratch.Scrap(place / "localq-gone.md", 8, scratch.UNSAVED).remove() == 0


def test_an_entry_that_vanishes_hides_no_other(place, monkeypatch):
    listed, scandir = [f"localq-{each * 8}.md" for each in "abc"], os.scandir
    for name in listed:
        os.utime(written(place, name), (time.time() - 90_000,) * 2)

    @contextlib.contextmanager
    def vanishing(folder):
        with scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        (place / listed[1]).unlink(missing_ok=True)
        yield found

    monkeypatch.setattr(os, "scandir", vanishing)
    assert [each.path.name for each in scratch.find()] == [listed[0], listed[2]]


def test_a_temporary_folder_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/proc/nowhere")
    with pytest.raises(LocalqError, match="/proc/nowhere") as refused, scratch.scratch_folder(PREFIXES[0]):
        raise AssertionError
    assert refused.value.exit_code == ExitCode.DISK
