"""Snapshot files of the KV cache: places, size limit, eviction of the least recently used.

`<cache>/sessions/<conversation>-<database>.kv`, at most one for each conversation; their format is `engine.snapshot`.
A lost snapshot only costs reading the conversation again, so errors here never stop a chat.
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
NOT_KEPT = "snapshot not saved"
YOUNG_S = 60.0  # a younger part may belong to a process that has not locked it yet


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot on disk. used_s: time of writing or last use, in Unix seconds."""

    path: Path
    bytes: int
    used_s: float


@dataclass(frozen=True)
class UnusedFile:
    """A file to remove, and what it is. repo: empty, as `prune` also lists files of repositories."""

    path: Path
    bytes: int
    what: str
    repo: str = ""


def snapshot_path(database: Path, id: int) -> Path:
    """Path for the conversation `id` of the store at `database`; other stores use the same numbers."""
    mark = hashlib.sha256(os.fsencode(database.absolute())).hexdigest()[:12]
    return places.snapshots_dir() / f"{id}-{mark}{SUFFIX}"


def list_snapshots() -> list[SnapshotFile]:
    """All snapshots, the least recently used first. Raises OSError."""
    return sorted(_files(SUFFIX), key=lambda each: each.used_s)


def mark_used(path: Path) -> None:
    """Note that a snapshot was used. Raises nothing."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> None:
    """Remove a snapshot if there is one. Raises nothing: one that stays is checked before use."""
    with contextlib.suppress(OSError):
        path.unlink()


def make_room(path: Path, needed_bytes: int, cap_bytes: int) -> None:
    """Remove old snapshots so that `path` can take `needed_bytes` and all together at most `cap_bytes`.

    Raises LocalqError, with nothing removed: exit 3 where the cap is smaller, 9 where the disk is full.
    """
    if needed_bytes > cap_bytes:
        why = f"the snapshot needs {human_bytes(needed_bytes)}, but the limit is {human_bytes(cap_bytes)}"
        raise LocalqError(
            NOT_KEPT, why, "Raise the limit with `localq config set snapshots SIZE`.", ExitCode.DOES_NOT_FIT
        )
    with disk.disk_errors(path.parent):
        for part in abandoned_parts():
            part.path.unlink(missing_ok=True)
        disk.check_free(path.parent, needed_bytes, NOT_KEPT)
        others = [each for each in list_snapshots() if each.path != path]
        for each in to_evict(others, cap_bytes - needed_bytes):
            each.path.unlink(missing_ok=True)


def to_evict(found: list[SnapshotFile], cap_bytes: int) -> list[SnapshotFile]:
    """Return the files of `found` (least recently used first) to remove so that the rest fits `cap_bytes`."""
    left, going = sum(each.bytes for each in found), []
    for each in found:
        if left <= cap_bytes:
            break
        going.append(each)
        left -= each.bytes
    return going


def unused_files(database: Path, ids: set[int] | None, cap_bytes: int) -> list[UnusedFile]:
    """Files that can be removed. Raises LocalqError (exit 9).

    Abandoned parts, snapshots of conversations of `database` that are not in `ids` (None: unknown), and of the others
    what exceeds `cap_bytes`.
    """
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
        *(UnusedFile(each.path, each.bytes, "snapshot of a deleted conversation") for each in gone),
        *(UnusedFile(each.path, each.bytes, "snapshot over the size limit") for each in to_evict(left, cap_bytes)),
    ]


def free(unused: UnusedFile) -> int:
    """Remove a file; return the bytes freed. Raises LocalqError (exit 9)."""
    with disk.disk_errors(unused.path):
        unused.path.unlink(missing_ok=True)
    return unused.bytes


def abandoned_parts() -> list[SnapshotFile]:
    """Partial files of processes that died; a running process holds a lock. Raises OSError."""
    return [each for each in _files(PART) if time.time() - each.used_s > YOUNG_S and not _is_held(each.path)]


def _files(suffix: str) -> Iterator[SnapshotFile]:
    folder = places.snapshots_dir()
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            if path.name.endswith(suffix):
                status = path.lstat()
                yield SnapshotFile(path, status.st_size, status.st_mtime)


def _is_held(path: Path) -> bool:
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
