"""Files and folders that this user made, told from those of others in the same place.

In a folder that others may write to, a name that localq is about to use may be taken: by another user's file, by a link
to something dear to this user, by a pipe that blocks. None of these is read, written, locked or gone on with. A file is
this user's if it is a regular one with one name, not a link, and has the owner that a new file gets there; drives that
keep no owners give all files the same. Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

# O_NONBLOCK: opening a pipe must not wait for its other end.
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MODE = 0o666  # less what the umask takes


class ForeignError(OSError):
    """A file or folder by the name that localq uses is another user's, or of another kind."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EPERM, "belongs to another user, or is a link", str(path))


def owner_in(folder: Path) -> int:
    """The owner of this user's new files in `folder`, links followed.

    Raises ForeignError for a folder that another user made, and OSError.
    """
    found = os.stat(folder).st_uid
    return found if found == os.geteuid() or found == _probed_owner(folder) else _refuse(folder)


def _probed_owner(folder: Path) -> int:
    """The owner that the drive gives to a file that is made and removed."""
    probe = folder / f".new-{os.urandom(8).hex()}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(probe)


def _refuse(path: Path) -> NoReturn:
    raise ForeignError(path)


def is_own(path: Path, owner: int) -> bool:
    """Return whether `path` is a file of `owner` by the rules above; False if absent. Raises OSError."""
    try:
        return _is_plain(os.lstat(path), owner)
    except FileNotFoundError:
        return False


def is_free(path: Path, owner: int) -> bool:
    """Return whether `owner` may use the name `path`: no file has it, or its own does. Raises OSError."""
    return not os.path.lexists(path) or is_own(path, owner)


def open_own(path: Path, flags: int, owner: int | None = None) -> int:
    """Open a file of `owner` (default: this process's user), without following a link; the descriptor.

    flags: as for `os.open`; with O_CREAT the file is made. Raises ForeignError and OSError.
    """
    try:
        descriptor = os.open(path, flags | _FLAGS, _MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket, or a pipe without a reader
            raise ForeignError(path) from error
        raise
    if not _is_plain(os.fstat(descriptor), os.geteuid() if owner is None else owner):
        os.close(descriptor)
        raise ForeignError(path)
    return descriptor


@contextmanager
def reading(path: Path, owner: int | None = None) -> Iterator[int | None]:
    """The descriptor of a file of `owner` for reading; None without one, or where it is another's."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = open_own(path, os.O_RDONLY, owner)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_plain(found: os.stat_result, owner: int) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == owner and found.st_nlink <= 1
