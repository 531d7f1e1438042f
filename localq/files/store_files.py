"""Common code for other programs' stores: a model that is used in place, and the reading of their folders.

Nothing here writes. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localq import disk
from localq.errors import LocalqError, bad_file

MAGIC = b"GGUF"
MOST = 10_000  # entries of a folder that are looked at

OnUnreadable = Callable[[str, LocalqError], None]  # name of a model or store, and why it cannot be used


@dataclass(frozen=True)
class StoreModel:
    """A GGUF model of another program: its files, the first part first."""

    name: str
    store: str
    paths: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The file, or its first part."""
        return self.paths[0]


def check_magic(path: Path, name: str, again: str) -> None:
    """Raises LocalqError about `name` unless `path` is a file that begins as GGUF does."""
    try:
        begins = disk.read_regular(path, len(MAGIC))
    except FileNotFoundError as error:
        broken = "is a broken link" if path.is_symlink() else "is missing"
        raise bad_file(name, f"{path} {broken}", again) from error
    except disk.NotRegularError as error:
        raise bad_file(name, f"{path} is not a file", again) from error
    except OSError as error:
        raise disk.read_error(path, error, name) from error
    if begins != MAGIC:
        raise bad_file(name, f"{path} is not a GGUF file", again)


def below(folder: Path, depth: int, store: str, on_unreadable: OnUnreadable) -> Iterator[Path]:
    """The paths exactly `depth` levels below `folder`; each level that cannot be read is reported."""
    try:
        found = children(folder)
    except OSError as error:
        on_unreadable(store, disk.read_error(folder, error, store))
        return
    for path in found:
        if depth == 1:
            yield path
        else:
            yield from below(path, depth - 1, store, on_unreadable)


def children(folder: Path) -> list[Path]:
    """The entries of `folder`, sorted; [] where there is no such folder. Raises OSError."""
    try:
        return sorted(folder.iterdir())[:MOST]
    except (FileNotFoundError, NotADirectoryError):
        return []


def below_home(path: str) -> list[Path]:
    """`path` in the user's home folder, as a list; [] for a user without one."""
    try:
        return [Path.home() / path]
    except RuntimeError:
        return []
