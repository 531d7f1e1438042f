"""Records of files in the shared cache: that their hash was right, and whether localq fetched them.

One small file per content, `<records>/models--ORG--REPO/HASH.json`, written last, after the hash was checked and the
file's name was durable. A file with the stamp of its record (`checked_files.stamp`) is unchanged and is not hashed
again. A record that another user wrote counts as none. Only files that localq fetched are removed or replaced without a
question. No network.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk, places
from localq.files import checked_files
from localq.files.checked_files import Stamp
from localq.files.hub import cache as hub_cache

SCHEMA = 1
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Store:
    """A cache in the layout of the Hugging Face cache, with the folders of its downloads and records."""

    cache: Path
    parts: Path
    records: Path

    def blob(self, repo: str, content_id: str) -> Path:
        """The path of the content with this hash."""
        return hub_cache.repo_folder(repo, self.cache) / "blobs" / content_id

    def pointer(self, repo: str, commit: str, name: str) -> Path:
        """The path of the file `name` of a commit."""
        return hub_cache.repo_folder(repo, self.cache) / "snapshots" / commit / name

    def record(self, repo: str, content_id: str) -> Path:
        """The path of the record of this content."""
        return self.records / hub_cache.repo_folder(repo, self.cache).name / f"{content_id}.json"


def users() -> Store:
    """The store of the user's Hugging Face cache."""
    return Store(places.hub_cache(), places.downloads_dir(), places.pulled_dir())


def is_known(store: Store, repo: str, content_id: str, path: Path) -> bool:
    """Return whether `path` was hashed and found right, and has not changed since."""
    known, now = _read(store, repo, content_id), checked_files.stamp(path)
    return all(known.get(key) == value for key, value in now.items())


def is_ours(store: Store, repo: str, content_id: str, path: Path) -> bool:
    """Return whether localq fetched `path`, even if it was changed since."""
    return _is_ours(_read(store, repo, content_id), checked_files.stamp(path))


def _is_ours(known: dict[str, Any], now: Stamp) -> bool:
    return known.get("ours") is True and all(known.get(key, now[key]) == now[key] for key in ("inode", "uid"))


def remember(store: Store, repo: str, content_id: str, path: Path, *, ours: bool, stamp: Stamp | None = None) -> None:
    """Record that the content of `path` is right. stamp: of the file that was hashed, default now. Raises OSError."""
    body = {"schema": SCHEMA, **(stamp or checked_files.stamp(path)), "ours": ours}
    disk.write_durably(store.record(repo, content_id), json.dumps(body).encode())


def check(store: Store, repo: str, content_id: str, path: Path) -> bool:
    """Hash `path`, record it if right, and return whether it has the content `content_id`.

    The record of wrong content is marked, so that it is hashed before its next use, though its stamp is the recorded
    one: as where the disk lost bits. On read-only disks no record is written. Raises OSError of reading.
    """
    found = checked_files.right_stamp(path, content_id)
    with contextlib.suppress(OSError):  # files are hashed each time
        if found is None:
            _distrust(store, repo, content_id)
        else:
            ours = _is_ours(_read(store, repo, content_id), found)
            remember(store, repo, content_id, path, ours=ours, stamp=found)
    return found is not None


def _distrust(store: Store, repo: str, content_id: str) -> None:
    known = _read(store, repo, content_id)
    if known:
        disk.write_durably(store.record(repo, content_id), json.dumps({**known, "mtime_ns": 0}).encode())


def forget(store: Store, repo: str, content_id: str) -> None:
    """Remove the record of removed content. Raises OSError."""
    store.record(repo, content_id).unlink(missing_ok=True)


def _read(store: Store, repo: str, content_id: str) -> dict[str, Any]:
    return checked_files.read_record(store.record(repo, content_id), _MAX_BYTES)
