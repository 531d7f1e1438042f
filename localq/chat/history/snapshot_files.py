"""Where snapshots of the KV cache lie, how much disk they may take, and which go first: the least recently used.

`<cache>/sessions/<conversation>-<its database>.kv`, one for each conversation at most; `engine.snapshot` is what is in
them. All of them can be made again by reading the conversation, so nothing here is worth an error that stops a chat.
Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localq import disk, places
from localq.errors import ExitCode, LocalqError
from localq.wording import human_bytes

SUFFIX, PART = ".kv", ".part"
NOT_KEPT = "snapshot not kept"
YOUNG_S = 60.0  # a part of less than this may belong to a process that has not locked it yet


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot on disk. used_s: when it was written or last taken up, seconds since 1970."""

    path: Path
    bytes: int
    used_s: float


@dataclass(frozen=True)
class UnusedFile:
    """A file to remove, and what it is; of no repository."""

    path: Path
    bytes: int
    what: str
    repo: str = ""


def snapshot_path(database: Path, id: int) -> Path:
    """Of the conversation `id` of a `SessionStore` at `database`: another one has conversations of the same numbers."""
    mark = hashlib.sha256(os.fsencode(database.absolute())).hexdigest()[:12]
    return places.snapshots_dir() / f"{id}-{mark}{SUFFIX}"


def list_snapshots() -> list[SnapshotFile]:
    """All snapshots, the least recently used first. Raises OSError."""
    return sorted(_files(SUFFIX), key=lambda each: each.used_s)


def mark_used(path: Path) -> None:
    """Note that a snapshot was taken up. Raises nothing."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> None:
    """Remove a snapshot if there is one. Raises nothing: what stays is never used wrongly."""
    with contextlib.suppress(OSError):
        path.unlink()


def make_room(path: Path, needed_bytes: int, cap_bytes: int) -> None:
    """Let one of `needed_bytes` be written to `path`: all together then take `cap_bytes` at most.

    Raises LocalqError: exit 3 where the cap alone is less, 9 where the disk has no room. Then nothing was removed.
    """
    if needed_bytes > cap_bytes:
        why = f"it takes {human_bytes(needed_bytes)}, and {human_bytes(cap_bytes)} are allowed"
        raise LocalqError(NOT_KEPT, why, "`localq config set snapshots SIZE` allows more.", ExitCode.DOES_NOT_FIT)
    with disk.disk_errors(path.parent):
        for part in abandoned_parts():
            part.path.unlink(missing_ok=True)
        disk.check_free(path.parent, needed_bytes, NOT_KEPT)
        others = [each for each in list_snapshots() if each.path != path]
        for each in to_evict(others, cap_bytes - needed_bytes):
            each.path.unlink(missing_ok=True)


def to_evict(found: list[SnapshotFile], cap_bytes: int) -> list[SnapshotFile]:
    """Which of `found`, the least recently used first, must go so that the rest takes `cap_bytes` at most."""
    left, going = sum(each.bytes for each in found), []
    for each in found:
        if left <= cap_bytes:
            break
        going.append(each)
        left -= each.bytes
    return going


def unused_files(database: Path, ids: set[int] | None, cap_bytes: int) -> list[UnusedFile]:
    """What can go: parts that nobody writes, snapshots of conversations of `database` that are not among `ids` (None =
    unknown), and what is more than `cap_bytes` of the others. Raises LocalqError (exit 9)."""
    mark = snapshot_path(database, 0).name.partition("-")[2]
    with disk.disk_errors(places.snapshots_dir()):
        parts, found = abandoned_parts(), list_snapshots()
    gone = []
    if ids is not None:
        mine = {snapshot_path(database, id) for id in ids}
        gone = [each for each in found if each.path.name.partition("-")[2] == mark and each.path not in mine]
    left = [each for each in found if each not in gone]
    return [
        *(UnusedFile(each.path, each.bytes, "unfinished snapshot") for each in parts),
        *(UnusedFile(each.path, each.bytes, "snapshot of a conversation that is gone") for each in gone),
        *(UnusedFile(each.path, each.bytes, "snapshot beyond the size allowed") for each in to_evict(left, cap_bytes)),
    ]


def free(unused: UnusedFile) -> int:
    """Remove it; the bytes freed. Raises LocalqError (exit 9)."""
    with disk.disk_errors(unused.path):
        unused.path.unlink(missing_ok=True)
    return unused.bytes


def abandoned_parts() -> list[SnapshotFile]:
    """What processes that died have written in part: a living one holds a lock. Raises OSError."""
    return [each for each in _files(PART) if time.time() - each.used_s > YOUNG_S and not _held(each.path)]


def _files(suffix: str) -> Iterator[SnapshotFile]:
    folder = places.snapshots_dir()
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            if path.name.endswith(suffix):
                status = path.lstat()
                yield SnapshotFile(path, status.st_size, status.st_mtime)


def _held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
