"""The disk as downloads meet it: free space before the first byte, hashes after the last, errors with a cause."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localq.errors import ExitCode, LocalqError, usage_error

RESERVE_BYTES = 2**30  # what a download leaves free, at most; less for models that are smaller than this


def check_free(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises LocalqError (exit 9) unless the disk of `folder`, which need not exist, takes `needed_bytes` and more.

    As much again as is needed, at most `RESERVE_BYTES`, must stay free: a full disk breaks other programs.
    """
    free = free_bytes(folder)
    if needed_bytes + min(needed_bytes, RESERVE_BYTES) > free:
        why = f"{needed_bytes:,} bytes and a reserve are needed in {folder}, and {free:,} bytes are free"
        raise LocalqError(what, why, "Free some space; `localq ls` and `localq rm` help.", ExitCode.DISK)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk that `folder`, which need not exist, lies on. Raises LocalqError (exit 9)."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    with disk_errors(place):
        return shutil.disk_usage(place).free


def disk_error(folder: Path, error: OSError, needed_bytes: int | None = None) -> LocalqError:
    """The LocalqError (exit 9) for an OSError of writing below `folder`; `needed_bytes`: what was still to come."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    why = "the disk is full" if full else f"cannot be written ({error.strerror or error})"
    if full and needed_bytes is not None:
        why += f": {needed_bytes:,} bytes are still needed, {free_bytes(folder):,} are free"
    step = "Free some space and run the same command again." if full else "Check the path and its permissions."
    return LocalqError(str(folder), why, step, ExitCode.DISK)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of writing below `folder` into a LocalqError (exit 9)."""
    try:
        yield
    except OSError as error:
        raise disk_error(folder, error) from error


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """An empty folder for what is needed for a moment. Raises LocalqError (exit 9), also for OSErrors of its user."""
    with disk_errors(Path(os.environ.get("TMPDIR") or "/tmp")):
        place = Path(tempfile.gettempdir())  # the first that can be written to
    with disk_errors(place), tempfile.TemporaryDirectory(prefix=prefix) as name:
        yield Path(name)


def bytes_of(paths: Iterable[Path]) -> int:
    """Bytes of these files, of those that are still there. Raises OSError."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_blob_sha1_of(path: Path) -> str:
    """Hex id that git gives to the content of a file: sha1 of "blob <size>", NUL, content."""
    with path.open("rb") as file:
        digest = hashlib.sha1(f"blob {os.fstat(file.fileno()).st_size}\0".encode(), usedforsecurity=False)
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def has_content(path: Path, content_id: str) -> bool:
    """The content of a file is the one that `content_id` names: 64 hex digits are a sha256, 40 git's id of it."""
    return (sha256_of(path) if len(content_id) == 64 else git_blob_sha1_of(path)) == content_id


def make_folder(folder: Path) -> None:
    """Make `folder` and those above it, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def write_durably(path: Path, content: bytes, scratch: Path | None = None) -> None:
    """Replace the file at `path` by one with `content`: before or after a power cut, one of the two is there.

    It is written in the folder `scratch` of the same disk first, else beside its place.
    """
    scratch = scratch or path.parent
    make_folder(path.parent)
    make_folder(scratch)
    descriptor, new = tempfile.mkstemp(dir=scratch, prefix=".new-")
    try:
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(new, path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_all(descriptor: int, content: bytes) -> None:
    """Write `content`, in as many pieces as the system takes it."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable: of new files, and renamed ones."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MOST_BYTES = 2**20  # of a file that goes before a message; a conversation may have little more


def text_of(path: Path) -> str:
    """The text of a UTF-8 file of at most MOST_BYTES. Raises LocalqError (exit 2) for anything else.

    The file is a regular one, or a pipe that the shell has opened for this process: FILE may be <(COMMAND).
    """
    given = path.parent == Path("/dev/fd")
    try:
        # O_NONBLOCK: opening a named pipe must not wait for somebody who writes to it.
        descriptor = os.open(path.expanduser(), os.O_RDONLY | (0 if given else os.O_NONBLOCK))
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or (given and stat.S_ISFIFO(mode))):
                raise usage_error(str(path), "it is no regular file", "Give a text file.")
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        why = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise usage_error(str(path), why, "Check the path.") from error
    if len(raw) > MOST_BYTES:
        raise usage_error(str(path), f"it has more than {MOST_BYTES / 1e6:.1f} MB", "Give a part of it.")
    if b"\0" in raw:
        raise usage_error(str(path), "it is no text", "Give a text file.")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise usage_error(str(path), f"it is not UTF-8 (byte {error.start})", "Convert it: iconv -t utf-8.") from error
