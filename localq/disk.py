"""Disk helpers: free space, durable writes, hashes, text files, OSErrors as LocalqErrors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localq import places
from localq.errors import ExitCode, LocalqError, usage_error

RESERVE_BYTES = 2**30  # a download leaves this much free; less for smaller models


def check_free(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises LocalqError (exit 9) unless the disk of `folder` has room for `needed_bytes`.

    The same amount, at most `RESERVE_BYTES`, must stay free: a full disk breaks other programs.
    """
    free = free_bytes(folder)
    if needed_bytes + min(needed_bytes, RESERVE_BYTES) > free:
        why = f"{needed_bytes:,} bytes plus a reserve needed in {folder}, but only {free:,} bytes free"
        raise LocalqError(what, why, "Free some space with `localq prune` or `localq rm`.", ExitCode.DISK)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk of `folder`, which need not exist. Raises LocalqError (exit 9)."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    with disk_errors(place):
        return shutil.disk_usage(place).free


def disk_error(folder: Path, error: OSError, needed_bytes: int | None = None) -> LocalqError:
    """The LocalqError (exit 9) for an OSError of writing below `folder`, `needed_bytes` before the end."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    why = "the disk is full" if full else f"cannot write ({error.strerror or error})"
    if full and needed_bytes is not None:
        why += f": {needed_bytes:,} bytes needed, {free_bytes(folder):,} free"
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
    """A temporary folder. Raises LocalqError (exit 9), also for OSErrors inside the context."""
    with disk_errors(Path(os.environ.get("TMPDIR") or "/tmp")):
        place = Path(tempfile.gettempdir())  # the first writable one
    with disk_errors(place), tempfile.TemporaryDirectory(prefix=prefix) as name:
        yield Path(name)


def total_bytes(paths: Iterable[Path]) -> int:
    """Bytes of the files that exist. Raises OSError."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total


def read_ahead(paths: Iterable[Path], limit_bytes: int) -> None:
    """Ask the system to read files into the page cache, up to `limit_bytes` in all; returns before they are there.

    A file that cannot be opened is passed over: who reads it says why.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            with path.open("rb") as file:
                size = min(os.fstat(file.fileno()).st_size, limit_bytes)
                os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_WILLNEED)
            limit_bytes -= size
        if limit_bytes <= 0:
            return


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read once."""
    import hashlib  # start-up cost: 2 ms, and every verb imports this module

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_blob_sha1_of(path: Path) -> str:
    """Git's hex id of a file's content: sha1 of "blob <size>", NUL, content."""
    import hashlib  # start-up cost, as above

    with path.open("rb") as file:
        digest = hashlib.sha1(f"blob {os.fstat(file.fileno()).st_size}\0".encode(), usedforsecurity=False)
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def has_content(path: Path, content_id: str) -> bool:
    """Whether a file has the content `content_id`: a sha256 (64 hex digits) or git's id (40)."""
    return (sha256_of(path) if len(content_id) == 64 else git_blob_sha1_of(path)) == content_id


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, durably."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def write_durably(path: Path, content: bytes, scratch: Path | None = None) -> None:
    """Replace the file at `path` atomically: a power cut leaves the old file or the new one.

    The content is first written to the folder `scratch` on the same disk, default the folder of `path`.
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
    """Write all of `content`."""
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def sync_folder(folder: Path) -> None:
    """Make new and renamed files in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MOST_TEXT_BYTES = 2**20  # of a text file; a context holds little more


def read_text(path: Path) -> str:
    """The text of a UTF-8 file of at most MOST_TEXT_BYTES. Raises LocalqError (exit 2) for anything else.

    A regular file, or a pipe that the shell opened: FILE may be <(COMMAND).
    """
    is_pipe = path.parent == Path("/dev/fd")
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(places.expand(path), os.O_RDONLY | (0 if is_pipe else os.O_NONBLOCK))
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not (stat.S_ISREG(mode) or (is_pipe and stat.S_ISFIFO(mode))):
                raise usage_error(str(path), "not a regular file", "Use a text file.")
            raw = file.read(MOST_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        why = f"cannot read it ({getattr(error, 'strerror', None) or error})"
        raise usage_error(str(path), why, "Check the path.") from error
    if len(raw) > MOST_TEXT_BYTES:
        raise usage_error(str(path), f"larger than {MOST_TEXT_BYTES / 1e6:.1f} MB", "Use a smaller file.")
    if b"\0" in raw:
        raise usage_error(str(path), "not a text file", "Use a text file.")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise usage_error(str(path), f"not UTF-8 (byte {error.start})", "Convert it with `iconv -t utf-8`.") from error
