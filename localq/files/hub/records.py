"""Records of files in the shared cache: their hash was right, and whether localq put them there.

One small file for each content, `<records>/models--ORG--REPO/HASH.json`, written last: after the hash of the file was
checked and its name was durable. A file that has the size, the inode and the time of its record was not touched since
and is not hashed again. Only a file that localq put there is ever removed or replaced without a question. No network.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk, places
from localq.errors import LocalqError
from localq.files.hub import cache as hub_cache
from localq.files.json_files import read_object

SCHEMA = 1
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Store:
    """A cache in the layout of the Hugging Face cache, and where its downloads and the records of it are."""

    cache: Path
    parts: Path
    records: Path

    def blob(self, repo: str, content_id: str) -> Path:
        """Where the content with this hash belongs."""
        return hub_cache.repo_folder(repo, self.cache) / "blobs" / content_id

    def pointer(self, repo: str, commit: str, name: str) -> Path:
        """Where the file `name` of a commit belongs."""
        return hub_cache.repo_folder(repo, self.cache) / "snapshots" / commit / name

    def record(self, repo: str, content_id: str) -> Path:
        """The record of this content."""
        return self.records / hub_cache.repo_folder(repo, self.cache).name / f"{content_id}.json"


def users() -> Store:
    """The user's own."""
    return Store(places.hub_cache(), places.downloads_dir(), places.pulled_dir())


def is_known(store: Store, repo: str, content_id: str, path: Path) -> bool:
    """The content of `path` was found right, and nobody has written to it since (as size, time and inode tell)."""
    known, now = _read(store, repo, content_id), _stamp(path)
    return all(known.get(key) == value for key, value in now.items())


def is_ours(store: Store, repo: str, content_id: str, path: Path) -> bool:
    """localq put `path` there itself, whatever was done to it since."""
    known = _read(store, repo, content_id)
    return known.get("ours") is True and known.get("inode") == path.stat().st_ino


def remember(store: Store, repo: str, content_id: str, path: Path, *, ours: bool) -> None:
    """Record that the content of `path` is right. Raises OSError."""
    body = {"schema": SCHEMA, **_stamp(path), "ours": ours}
    disk.write_durably(store.record(repo, content_id), json.dumps(body).encode())


def check(store: Store, repo: str, content_id: str, path: Path) -> bool:
    """Hash `path`, and record it where it is right; who put it there stays as it is. Raises OSError of reading.

    Where nothing can be recorded (a machine whose disks are read-only), it is hashed each time.
    """
    ours = is_ours(store, repo, content_id, path)
    if not disk.has_content(path, content_id):
        return False
    with contextlib.suppress(OSError):
        remember(store, repo, content_id, path, ours=ours)
    return True


def distrust(store: Store, repo: str, content_id: str) -> None:
    """Let the content be hashed before it is used again. Raises OSError."""
    known = _read(store, repo, content_id)
    if known:
        disk.write_durably(store.record(repo, content_id), json.dumps({**known, "mtime_ns": 0}).encode())


def forget(store: Store, repo: str, content_id: str) -> None:
    """Remove a record: its content is gone. Raises OSError."""
    store.record(repo, content_id).unlink(missing_ok=True)


def _stamp(path: Path) -> dict[str, int]:
    stat = os.stat(path)
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}


def _read(store: Store, repo: str, content_id: str) -> dict[str, Any]:
    path = store.record(repo, content_id)
    if not path.is_file():
        return {}
    try:
        return read_object(path, _MAX_BYTES)
    except LocalqError:  # damaged: as if there were none
        return {}
