"""Disk helpers: free space, files opened for writing, hashes, text files, OSErrors as LocalqErrors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

from localq import places
from localq.errors import ExitCode, LocalqError, usage_error

RESERVE_BYTES = 2**30  # a download leaves this much free; less for smaller models
NEW_FILE_MODE = 0o666  # less what the umask takes


def check_free(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises LocalqError (exit 9) unless the disk of `folder` has room for `needed_bytes`.

    The same amount, at most `RESERVE_BYTES`, must stay free: a full disk breaks other programs.
    """
    free = free_bytes(folder)
    if needed_bytes + min(needed_bytes, RESERVE_BYTES) > free:
        why = (
            f"not enough free disk space in {folder}: {needed_bytes:,} bytes plus a reserve are needed, but only "
            f"{free:,} bytes are free"
        )
        raise LocalqError(what, why, "Free some space with `localq prune` or `localq rm`.", ExitCode.DISK)


def free_bytes(folder: Path) -> int:
    """Free bytes of the disk of `folder`, which need not exist. Raises LocalqError (exit 9)."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    with disk_errors(place):
        return shutil.disk_usage(place).free


def read_error(path: Path, error: OSError, what: str = "") -> LocalqError:
    """The LocalqError (exit 9) for an OSError of reading below `path`, about `what` (default: the file it names)."""
    named = error.filename if isinstance(error.filename, str) else str(path)
    reason = error.strerror or error
    why = f"{named} cannot be read ({reason})" if what else f"cannot be read ({reason})"
    is_faulty = error.errno in (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT)
    step = "Check the disk or network drive that holds the file." if is_faulty else "Check its owner and permissions."
    return LocalqError(what or named, why, step, ExitCode.DISK)


@contextmanager
def read_errors(path: Path, what: str = "") -> Iterator[None]:
    """Turn an OSError of reading below `path` into a LocalqError (exit 9), as `read_error`."""
    try:
        yield
    except OSError as error:
        raise read_error(path, error, what) from error


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


def resolve(path: Path) -> Path:
    """The file that `path` leads to, which need not exist. Raises OSError, also for a loop of links."""
    try:
        return path.resolve()
    except RuntimeError as error:  # pathlib's for a loop, Python < 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


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
    """Return whether a file has the content `content_id`: a sha256 (64 hex digits) or a git id (40)."""
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

    The content is first written to the folder `scratch` on the same disk, default the folder of `path`. Mode and group
    are those of a new file in the folder of `path`: others who share it may read what the umask lets them.
    """
    with replacement(path, scratch) as file:
        file.write(content)


def take_rights(descriptor: int, folder: Path) -> None:
    """Give an open file the mode and group of a new file in `folder`, to which it is about to be renamed.

    They follow the umask, the folder's group (setgid) and its default access list.
    """
    with contextlib.suppress(OSError):  # a drive without unnamed files: what the umask gave stays
        probe = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, NEW_FILE_MODE)
        try:
            right = os.fstat(probe)
        finally:
            os.close(probe)
        if os.fstat(descriptor).st_gid != right.st_gid:
            os.fchown(descriptor, -1, right.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(right.st_mode))


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


# ---- files opened for writing: nothing that exists is emptied by opening, and no link is followed

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL follows no link
_PRESENT = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe by this name must not block


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[BufferedRandom]:
    """A new file, readable too; removed where the block raises. Raises OSError, FileExistsError also for a link."""
    file = os.fdopen(os.open(path, _NEW, mode), "w+b")
    try:
        with file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def part_file(path: Path, mode: int = NEW_FILE_MODE) -> Iterator[BufferedRandom]:
    """A new file instead of an earlier one, or of a link, of this name. It stays where the block raises.

    For names that only localq gives: what has them is left from a process that was killed. Raises OSError.
    """
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, _NEW, mode), "w+b") as file:
        yield file


@contextmanager
def replacement(path: Path, scratch: Path | None = None, mode: int | None = None) -> Iterator[BufferedRandom]:
    """A new file that takes the place of `path`, synced, at the end of the block; an error leaves what was there.

    It is made in the folder `scratch` on the same disk, default the folder of `path`; both are created. Mode and group
    are those of a new file in the folder of `path`; `mode` states another. A link at `path` is replaced, not followed.
    """
    scratch = scratch or path.parent
    make_folder(path.parent)
    make_folder(scratch)
    new = scratch / f".new-{os.urandom(8).hex()}"
    with new_file(new, NEW_FILE_MODE if mode is None else 0o600) as file:
        yield file
        file.flush()
        if mode is None:
            take_rights(file.fileno(), path.parent)
        else:
            os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
        os.replace(new, path)
    sync_folder(path.parent)


def open_to_append(path: Path) -> int:
    """The descriptor of a regular file, made if missing, at whose end is written. Raises OSError, also for a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _PRESENT, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def temporary_file(prefix: str, suffix: str, content: bytes) -> Iterator[Path]:
    """A private file (0600) with `content` in the folder for temporary files, removed at the end. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=suffix)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raise LocalqError (exit 9) unless a file can be made or replaced at `path`; exit 2 for a link. Opens nothing."""
    with disk_errors(path):
        found = path.stat() if path.exists() else None
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        is_link = path.is_symlink()
        if is_link and found is None:
            raise FileNotFoundError(errno.ENOENT, "the link is broken")
        if is_link and found is not None and stat.S_ISREG(found.st_mode) and not _is_stream(path):
            raise usage_error(
                str(path), f"this is a link to {resolve(path)}", "To replace the target file, pass its path instead."
            )
        place = resolve(path).parent if found is None or stat.S_ISREG(found.st_mode) else path
        place.stat()
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


_STREAMS = ("/dev/fd/", "/dev/std", "/proc/")  # what the shell has opened


def _is_stream(path: Path) -> bool:
    return str(path.absolute()).startswith(_STREAMS)


class LazyOutput:
    """The file of an option such as `--think-out`, opened with the first piece: until then it keeps what it has.

    A file is replaced by a new one of the same mode, which holds the first piece before it takes the name; a device or
    a pipe is written to. Raises LocalqError: exit 9, and 2 for a link, which may lead to a file that nobody meant.
    """

    def __init__(self, path: Path) -> None:
        check_replaceable(path)
        self._path = path
        self._file: int | None = None
        if path.is_char_device():  # it has nothing to lose
            with disk_errors(path):
                self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)

    @property
    def is_terminal(self) -> bool:
        """True if the output is a terminal."""
        return self._file is not None and os.isatty(self._file)

    def write(self, content: bytes) -> None:
        """Write a piece, which other programs see at once."""
        with disk_errors(self._path):
            if self._file is None:
                self._file = self._open(content)
            else:
                write_all(self._file, content)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._file = self._file, None
        if descriptor is not None:
            with disk_errors(self._path):
                os.close(descriptor)

    def _open(self, content: bytes) -> int:
        if _is_stream(self._path) or (self._path.exists() and not self._path.is_file()):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(descriptor, True)  # only a pipe that nobody reads is not waited for
            write_all(descriptor, content)
            return descriptor
        target = self._path
        with replacement(target, mode=stat.S_IMODE(target.stat().st_mode) if target.exists() else None) as file:
            file.write(content)
            return os.dup(file.fileno())


# ---- text files

MOST_TEXT_BYTES = 2**20  # of a text file; a context holds little more


class NotRegularError(Exception):
    """A folder, a pipe or a device in the place of a file."""


def read_regular(path: Path, most_bytes: int, *, or_null: bool = False) -> bytes:
    """The first `most_bytes` of a regular file; or_null: /dev/null is an empty one.

    Raises OSError and NotRegularError; opens nothing else, since opening a device can have effects.
    """
    _check_regular(os.stat(path), or_null)
    # O_NONBLOCK: a named pipe that is there by now must not be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check_regular(os.fstat(descriptor), or_null)
        return file.read(most_bytes)


def _check_regular(found: os.stat_result, or_null: bool) -> None:
    if not stat.S_ISREG(found.st_mode) and not (or_null and found.st_rdev == os.stat(os.devnull).st_rdev):
        raise NotRegularError


def read_start(path: Path, most_bytes: int, *, devices: bool = False) -> bytes:
    """The first `most_bytes` of a regular file, or of a pipe that the shell opened: FILE may be <(COMMAND).

    devices: also of a device, such as /dev/null. Raises OSError, ValueError for a NUL in the path, and LocalqError
    (exit 2) for anything else that is no file.
    """
    is_pipe = path.parent == Path("/dev/fd")
    # O_NONBLOCK: opening a named pipe must not wait for a writer.
    descriptor = os.open(places.expand(path), os.O_RDONLY | (0 if is_pipe else os.O_NONBLOCK))
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or (is_pipe and stat.S_ISFIFO(mode)) or (devices and stat.S_ISCHR(mode))):
            raise usage_error(str(path), "not a regular file", "Use a text file.")
        return file.read(most_bytes)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file of at most MOST_TEXT_BYTES. Raises LocalqError (exit 2) for anything else."""
    try:
        raw = read_start(path, MOST_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        why = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise usage_error(str(path), why, "Check the path.") from error
    if len(raw) > MOST_TEXT_BYTES:
        raise usage_error(str(path), f"too large (limit: {MOST_TEXT_BYTES / 1e6:.1f} MB)", "Use a smaller file.")
    if b"\0" in raw:
        raise usage_error(str(path), "not a text file", "Use a text file.")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise usage_error(
            str(path), f"not valid UTF-8 (at byte {error.start})", "Convert it with `iconv -t utf-8`."
        ) from error
