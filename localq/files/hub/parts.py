"""Unfinished downloads on the disk: the bytes so far, and how many of them are durable.

    HASH.part    the bytes so far; HASH is the sha256 (or git id) of the complete file
    HASH.state   a line of JSON (repo, name, size, etag), then one count of durable bytes per `STEP_BYTES`; each line is
                 appended after its bytes were forced to the disk
    HASH.lock    locked by the process that works on the part, which locks the part too

After a kill or a power cut the last complete line of the state counts the durable bytes; the rest is cut off and
fetched again. The state of a hash function cannot be saved, so a resumed part is hashed again from its beginning. This
also finds damage on the disk. On drives without working locks (some network drives) each process has its own part, and
so it has where another user's file, or a link, has one of these names (`own_files`). No network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk
from localq.files import own_files

# A kill loses at most 16 MiB: up to this many bytes not yet durable, and as many in the system's buffers.
STEP_BYTES = 8 * 2**20
POLL_S = 0.2
_TRIES, _TRY_S = 10, 0.02  # to lock a part that another process looks at
_BLOCK_BYTES = 2**20
_MAX_STATE_BYTES = 2**20
_FLAGS = os.O_RDWR | os.O_CREAT
_ETAG = re.compile(r'(W/)?"[!#-~]{0,200}"')
_NAME = re.compile(r"(?P<id>[0-9a-f]{40}|[0-9a-f]{64})(\.[0-9a-f]{16})?\.part")


@dataclass(frozen=True)
class UnfinishedPart:
    """An unfinished download. `repo` and `name` are empty if it ended before its first step."""

    path: Path
    repo: str
    name: str
    bytes: int
    busy: bool


class Part:
    """The bytes of one file so far. A context manager: leaving it makes the received bytes durable.

    at    number of bytes received
    etag  the server's etag of their content
    """

    def __init__(self, stem: Path, content_id: str, about: dict[str, Any]) -> None:
        """stem: path without a suffix; `about`: repo, name and size of the file.

        Raises OSError, also for files of another user.
        """
        self.path, self._state_path = stem.with_name(f"{stem.name}.part"), stem.with_name(f"{stem.name}.state")
        self._id, self._about, self.size = content_id, about, int(about["size"])
        owner = own_files.owner_in(stem.parent)
        self._fd = _open_locked(self.path, owner)
        try:
            self._state_fd = own_files.open_own(self._state_path, _FLAGS | os.O_APPEND, owner)
        except OSError:
            os.close(self._fd)
            raise
        known, self._durable, end = _read_state(self._state_fd)
        os.ftruncate(self._state_fd, end)
        self.etag: str | None = valid_etag(known.get("etag"))
        self._has_header = end > 0
        self.at = self._durable = min(self._durable, os.fstat(self._fd).st_size, self.size)
        os.ftruncate(self._fd, self.at)
        self._digest = _new_digest(content_id, self.size)
        for block in iter(lambda: os.read(self._fd, _BLOCK_BYTES), b""):
            self._digest.update(block)

    def write(self, piece: bytes) -> None:
        """Append `piece`; durable after every `STEP_BYTES`. Raises OSError."""
        disk.write_all(self._fd, piece)
        self._digest.update(piece)
        self.at += len(piece)
        if self.at - self._durable >= STEP_BYTES:
            self.sync()

    def sync(self) -> None:
        """Force the bytes to the disk, then count them in the state. Raises OSError."""
        os.fsync(self._fd)
        line = f"{self.at}\n"
        if not self._has_header:
            line = json.dumps({**self._about, "etag": self.etag}) + "\n" + line
        disk.write_all(self._state_fd, line.encode())
        os.fsync(self._state_fd)
        if not self._has_header:
            disk.sync_folder(self.path.parent)
        self._has_header, self._durable = True, self.at

    def restart(self) -> None:
        """Discard all bytes: they belong to other content. Raises OSError."""
        os.ftruncate(self._state_fd, 0)
        os.fsync(self._state_fd)
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.at = self._durable = 0
        self.etag, self._has_header = None, False
        self._digest = _new_digest(self._id, self.size)

    def is_right(self) -> bool:
        """Return whether all bytes have arrived and their hash is right."""
        return self.at == self.size and self._digest.hexdigest() == self._id

    def finish(self, folder: Path) -> Path:
        """Force all bytes to the disk, before the part is renamed into `folder`; returns its path. Raises OSError."""
        disk.take_rights(self._fd, folder)
        os.fsync(self._fd)
        self._durable = self.at
        return self.path

    def stat_at(self, path: Path) -> os.stat_result | None:
        """The part's stat if `path`, links followed, leads to it; None for another file. Raises OSError."""
        ours = os.fstat(self._fd)
        return ours if os.path.samestat(os.stat(path), ours) else None

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # the disk may be full; the last step is durable
            if self.at > self._durable:
                self.sync()
        os.close(self._fd)
        os.close(self._state_fd)
        if self.at == 0 or not self.path.exists():  # nothing was received, or it has its final name
            self.path.unlink(missing_ok=True)
            self._state_path.unlink(missing_ok=True)


def valid_etag(value: object) -> str | None:
    """`value`, a header or what a state has, if it is an etag of ASCII that can be sent back; else None."""
    return value if isinstance(value, str) and _ETAG.fullmatch(value) else None


def _new_digest(content_id: str, size: int) -> Any:
    if len(content_id) == 64:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


def _read_state(descriptor: int | None) -> tuple[dict[str, Any], int, int]:
    """(header, durable bytes, length of the valid lines) of a state; ({}, 0, 0) for a damaged one, or none."""
    if descriptor is None:
        return {}, 0, 0
    header, *counts = os.pread(descriptor, _MAX_STATE_BYTES, 0).split(b"\n")
    try:
        known = json.loads(header) if counts else {}
    except (ValueError, RecursionError):
        known = {}
    if not isinstance(known, dict) or not known:
        return {}, 0, 0
    durable, end = 0, len(header) + 1
    for line in counts[:-1]:  # the last line is incomplete
        if not line.isdigit() or len(line) > 18 or int(line) < durable:
            break
        durable, end = int(line), end + len(line) + 1
    return known, durable, end


# ---- locks


@contextlib.contextmanager
def claim(folder: Path, content_id: str, waiting: Callable[[], None]) -> Iterator[Path]:
    """The stem of the part of `content_id` in `folder`, locked for this process.

    `waiting` is called while another process holds it. Raises OSError.
    """
    disk.make_folder(folder)
    owner = own_files.owner_in(folder)
    stem, lock = folder / content_id, folder / f"{content_id}.lock"
    alone = folder / f"{content_id}.{os.urandom(8).hex()}"
    names = (stem.with_suffix(".part"), stem.with_suffix(".state"), lock)
    if not all(own_files.is_free(path, owner) for path in names):
        yield alone
        return
    descriptor = _lock(lock, owner, waiting)
    try:
        yield stem if _is_exclusive(lock, owner) else alone
        lock.unlink(missing_ok=True)  # kept after an error, for the processes that wait for it
    finally:
        os.close(descriptor)


def _open_locked(path: Path, owner: int) -> int:
    """The descriptor of the part `path`, locked: where nobody can lock by its name, `prune` sees that it is in use."""
    for _ in range(_TRIES):
        descriptor = own_files.open_own(path, _FLAGS, owner)
        if _try(descriptor) and _is_still(path, descriptor):
            return descriptor
        os.close(descriptor)
        time.sleep(_TRY_S)
    return own_files.open_own(path, _FLAGS, owner)  # another process keeps it locked


def _lock(path: Path, owner: int, waiting: Callable[[], None]) -> int:
    while True:
        descriptor = own_files.open_own(path, _FLAGS, owner)
        try:
            while not _try(descriptor):
                waiting()
                time.sleep(POLL_S)
            if _is_still(path, descriptor):  # the previous owner removes it when it is done
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    return False


def _try(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a drive without locks, which `_is_exclusive` detects
        return True
    return True


def _is_exclusive(path: Path, owner: int) -> bool:
    """Return whether locks work here; False if a held lock can be taken again."""
    descriptor = own_files.open_own(path, _FLAGS, owner)
    try:
        return not _try(descriptor)
    finally:
        os.close(descriptor)


# ---- unfinished downloads


def unfinished_parts(folder: Path) -> list[UnfinishedPart]:
    """This user's parts in `folder`, by path; none in a folder of another user. Raises OSError."""
    found: list[UnfinishedPart] = []
    try:
        owner = own_files.owner_in(folder)
    except OSError:  # no folder, another user's, or one that cannot be read
        return found
    for path in sorted(folder.glob("*.part")):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):  # finished meanwhile
            if match is None or not own_files.is_own(path, owner):
                continue
            with own_files.reading(path.with_suffix(".state"), owner) as state:
                known = _read_state(state)[0]
            repo, name = (str(known.get(key, "")) for key in ("repo", "name"))
            busy = _is_busy(folder / f"{match['id']}.lock", owner) or _is_busy(path, owner)
            found.append(UnfinishedPart(path, repo, name, path.lstat().st_size, busy))
    return found


def size_so_far(folder: Path, content_id: str) -> int:
    """Bytes of this user's part of `content_id` in `folder`, 0 without one: a process may remove it at any time."""
    path = folder / f"{content_id}.part"
    with contextlib.suppress(OSError):
        if own_files.is_own(path, own_files.owner_in(folder)):
            return path.lstat().st_size
    return 0


def remove(part: UnfinishedPart) -> int:
    """Remove a part with its state and lock; returns the bytes freed, 0 if a process works on it.

    Raises OSError.
    """
    lock = part.path.with_name(f"{part.path.name.partition('.')[0]}.lock")
    owner = own_files.owner_in(lock.parent)
    if not own_files.is_free(lock, owner):  # nobody locks by another user's file
        return _remove(part.path, owner, part.path.with_suffix(".state"))
    descriptor = own_files.open_own(lock, _FLAGS, owner)
    try:
        if not _try(descriptor) or not _is_still(lock, descriptor):
            return 0
        return _remove(part.path, owner, part.path.with_suffix(".state"), lock)
    finally:
        os.close(descriptor)


def _remove(part: Path, owner: int, *others: Path) -> int:
    """Remove a part, then `others`; returns its bytes, 0 if it was finished meanwhile, or a process has locked it."""
    with own_files.reading(part, owner) as descriptor:  # locked until it is removed
        if descriptor is not None and not _try(descriptor, fcntl.LOCK_SH):
            return 0
        freed = part.lstat().st_size if os.path.lexists(part) else 0
        for path in (part, *others):
            path.unlink(missing_ok=True)
    return freed


def _is_busy(lock: Path, owner: int) -> bool:
    """Return whether a process of this user holds the lock or part `lock`. Never writes: the disk may be read-only."""
    with own_files.reading(lock, owner) as descriptor:
        # Some network drives allow readers only a shared lock.
        return descriptor is not None and not _try(descriptor, fcntl.LOCK_SH)
