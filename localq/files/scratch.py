"""Temporary folders, and those that killed processes left behind.

A folder is locked while it is used, and its name has the id of the process: a folder that nobody locks, of a process
that does not run, is abandoned. It is removed when another one is made, after any command, and by `localq prune`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localq.disk import disk_errors

# As `tempfile` names and guards what it makes: a folder or text that a user calls localq-something is not ours.
_FOLDER, _FOLDER_MODE = re.compile(r"localq-(?:outline|index|header)-(?:(\d+)-)?[a-z0-9_]{8}"), 0o700
_TEXT, _TEXT_MODE = re.compile(r"localq-[a-z0-9_]{8}\.md"), 0o600  # of `chat.terminal.editor`: a text of the user
_TEXT_AGE_S = 86_400.0  # the editor may still run
ABANDONED, UNSAVED = "temporary folder left by a killed process", "leftover editor text"


@dataclass(frozen=True)
class Scrap:
    """A folder or text in the temporary folder that can be removed. `repo` is empty, as for other leftovers."""

    path: Path
    bytes: int
    what: str
    repo: str = ""

    def remove(self) -> int:
        """Remove it; returns the bytes freed, 0 if it is in use meanwhile, or cannot be removed."""
        return self.bytes if (_remove_folder if self.what == ABANDONED else _remove_text)(self.path) else 0


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder; abandoned ones are removed. Raises LocalqError (exit 9), also for OSErrors inside."""
    with disk_errors(Path(os.environ.get("TMPDIR") or "/tmp")):
        place = Path(tempfile.gettempdir())  # the first writable one
    remove_abandoned(place)
    name = f"{prefix}{os.getpid()}-"
    with disk_errors(place), tempfile.TemporaryDirectory(prefix=name, dir=place) as folder, _lock(Path(folder)):
        yield Path(folder)


def find() -> list[Scrap]:
    """Return leftovers of killed processes in the temporary folder, and texts an editor left a day ago."""
    try:
        place = Path(tempfile.gettempdir())
    except OSError:  # none can be written
        return []
    folders = [Scrap(path, _bytes(path), ABANDONED) for path in _abandoned(place)]
    texts = _own(place, _TEXT, stat.S_IFREG | _TEXT_MODE)
    old = [path for path, facts in texts.items() if time.time() - facts.st_mtime > _TEXT_AGE_S]
    return [*folders, *(Scrap(path, texts[path].st_size, UNSAVED) for path in old)]


def remove_abandoned(place: Path) -> None:
    """Remove the abandoned folders in the temporary folder `place`."""
    for path in _abandoned(place):
        _remove_folder(path)


def _abandoned(place: Path) -> list[Path]:
    found = []
    for path in _own(place, _FOLDER, stat.S_IFDIR | _FOLDER_MODE):
        matched = _FOLDER.fullmatch(path.name)
        assert matched is not None
        if matched[1] is None or not _is_running(int(matched[1])):
            with _lock(path) as is_free:
                found += [path] if is_free else []
    return found


def _own(place: Path, name: re.Pattern[str], mode: int) -> dict[Path, os.stat_result]:
    """This user's files in `place` with such a name, kind and mode, by path; what vanishes is passed over."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith("localq-") and name.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # removed meanwhile
                    facts = entry.stat(follow_symlinks=False)
                    if facts.st_uid == os.getuid() and facts.st_mode == mode:
                        found[Path(entry.path)] = facts
    return dict(sorted(found.items()))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no id that a process can have
        pass
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock `folder`, if nobody else does: whether it is locked now."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed meanwhile
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # locked, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove_text(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _remove_folder(folder: Path) -> bool:
    with _lock(folder) as is_free:
        if is_free:
            shutil.rmtree(folder, ignore_errors=True)
    return is_free and not folder.exists()


def _bytes(folder: Path) -> int:
    """Return the bytes that the files occupy on the disk: outlines are sparse."""
    with contextlib.suppress(OSError):
        return sum(512 * path.lstat().st_blocks for path in folder.rglob("*"))
    return 0
