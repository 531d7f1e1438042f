"""Files that localq downloaded and nothing uses: interrupted downloads, content without a revision.

No network.

Content from another tool in the Hugging Face cache is never included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localq import disk, places
from localq.errors import LocalqError
from localq.files.hub import cache as hub_cache
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.hub.parts import UnfinishedPart
from localq.files.hub.records import Store

UNFINISHED, UNUSED = "unfinished download", "not used by any revision"


@dataclass(frozen=True)
class Leftover:
    """A file that can be removed. `repo` is empty if unknown."""

    path: Path
    bytes: int
    what: str
    repo: str
    part: UnfinishedPart | None = None


def find(on_unreadable: Callable[[LocalqError], None]) -> list[Leftover]:
    """All leftovers, except files that a process works on now.

    on_unreadable: gets an error (exit 9) for each repository, or cache, that cannot be read.
    """
    parts = [part for part in download_parts.unfinished_parts(places.downloads_dir()) if not part.busy]
    found = [Leftover(part.path, part.bytes, UNFINISHED, part.repo, part) for part in parts]
    store, repos = hub_records.users(), {}
    try:
        repos = hub_cache.repos()
    except OSError as error:
        on_unreadable(disk.read_error(store.cache, error, "Hugging Face cache"))
    for repo, folder in repos.items():
        try:
            found += _unused_files(store, repo, folder)
        except OSError as error:
            on_unreadable(disk.read_error(folder, error, repo))
    return found


def remove(leftover: Leftover) -> int:
    """Remove `leftover`; returns the bytes freed, 0 if it is in use meanwhile.

    Raises LocalqError (exit 9).
    """
    with disk.disk_errors(leftover.path):
        if leftover.part is not None:
            return download_parts.remove(leftover.part)
        if disk.resolve(leftover.path) in _used_files(leftover.path.parent.parent):
            return 0
        leftover.path.unlink(missing_ok=True)
        hub_records.forget(hub_records.users(), leftover.repo, leftover.path.name)
        return leftover.bytes


def _used_files(folder: Path) -> set[Path]:
    """The files that the snapshots of a repository's `folder` link to.

    Raises OSError if one of them cannot be read: its files would seem unused.
    """
    return {used for path in hub_cache.names_below(folder / "snapshots") if (used := hub_cache.leads_to(path))}


def _unused_files(store: Store, repo: str, folder: Path) -> list[Leftover]:
    used, found = _used_files(folder), []
    for blob in hub_cache.children(folder / "blobs"):
        if not hub_cache.is_content_id(blob.name) or blob.is_symlink() or disk.resolve(blob) in used:
            continue
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if hub_records.is_ours(store, repo, blob.name, blob):
                found.append(Leftover(blob, blob.stat().st_size, UNUSED, repo))
    return found
