"""Writes models into the stores of ollama and LM Studio as these programs lay them out, below a home of the test."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

MODEL, TEMPLATE = "application/vnd.ollama.image.model", "application/vnd.ollama.image.template"


def use_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any models; returns the folder of ollama's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("localq.files.ollama_store._SERVICE", tmp_path / "service")
    for name in ("HF_HUB_CACHE", "LOCALQ_DATA", "LOCALQ_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    return tmp_path / ".ollama" / "models"


def layer(media_type: str, digest: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest, "size": 1}


def manifest(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": layer("application/vnd.docker.container.image.v1+json", "sha256:" + "c" * 64),
            "layers": list(layers)}  # fmt: skip


def add_blob(root: Path, content: bytes) -> str:
    """Store content; returns its digest."""
    digest = hashlib.sha256(content).hexdigest()
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "blobs" / f"sha256-{digest}").write_bytes(content)
    return f"sha256:{digest}"


def add_manifest(root: Path, name: str, body: Any, folder: str = "manifests") -> Path:
    """A manifest at HOST/NAMESPACE/NAME/TAG, or library/NAME/TAG for NAME/TAG."""
    parts = name.split("/")
    path = root / folder / "/".join((*("registry.ollama.ai", "library")[: 4 - len(parts)], *parts))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def add_ollama(root: Path, name: str, content: bytes) -> Path:
    """A model of ollama, NAME/TAG; returns the path of its blob."""
    digest = add_blob(root, content)
    add_manifest(root, name, manifest(layer(MODEL, digest), layer(TEMPLATE, add_blob(root, b"{{ .Prompt }}"))))
    return root / "blobs" / digest.replace(":", "-")


def add_lm_studio(home: Path, name: str, content: bytes, folder: str = ".lmstudio/models") -> Path:
    """A file of LM Studio, PUBLISHER/REPO/FILE."""
    path = home / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def state(root: Path) -> dict[str, tuple[int, int, int, bytes | str | None]]:
    """Everything below a folder: what changes where a file is written, renamed, touched or removed."""
    found = {}
    for path in sorted(root.rglob("*")):
        stat = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = (stat.st_ino, stat.st_mtime_ns, stat.st_mode, content)
    return found
