"""Writes models into the Hugging Face cache as its client lays them out, so that tests need no server for them."""

from __future__ import annotations

import os
from pathlib import Path

from localq.files.hub import cache as hub_cache
from tests.support.files import fake_hub


def put(repo: str, files: dict[str, bytes], commit: str = fake_hub.COMMIT, ref: str | None = "main") -> Path:
    """A snapshot of `files`, linked to blobs that are named as the client names them; the folder of it."""
    folder = hub_cache.repo_folder(repo)
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        lfs = name.endswith((".safetensors", ".gguf"))
        blob = folder / "blobs" / (fake_hub.sha256(content) if lfs else fake_hub.git_id(content))
        blob.write_bytes(content)
        pointer = snapshot / name
        pointer.parent.mkdir(exist_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


def stored_bytes(repo: str) -> int:
    """What the blobs of `repo` take."""
    return sum(path.lstat().st_size for path in (hub_cache.repo_folder(repo) / "blobs").glob("*"))
