"""Models that `localq quantize` made, for tests of uploads: tiny, with a record of where they come from."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from localq.cli import execute
from localq.files import checked_files
from localq.files.publish import record as records
from tests.support.models.tiny_checkpoints import make_checkpoint

BASE = "publisher/tiny-llama"
REVISION = "a" * 40


def make(folder: Path, format: str = "nf4", *options: str) -> Path:
    """Quantize a tiny Llama from a snapshot of `BASE` in a cache of the hub, by the command."""
    torch.set_num_threads(1)
    snapshot = folder / "cache" / "models--publisher--tiny-llama" / "snapshots" / REVISION
    if not snapshot.exists():
        shutil.move(make_checkpoint(folder / "source", "llama"), snapshot)
    out = folder / f"tiny-llama-{format}"
    assert execute(["quantize", str(snapshot), "--format", format, "--out", str(out), "-q", *options]) == 0
    return out


def copy(made: Path, folder: Path) -> Path:
    """A copy of a made model that a test may change."""
    return Path(shutil.copytree(made, folder / made.name))


def change_record(folder: Path, **fields: str) -> None:
    """Change the record of a made model, and its recorded hash."""
    found = records.read(folder)
    assert found is not None
    content = dataclasses.replace(found, **fields).to_bytes()
    (folder / records.RECORD_NAME).write_bytes(content)
    rehash(folder, records.RECORD_NAME)


def rehash(folder: Path, name: str) -> None:
    """Record the present content of a file as the right one."""
    from localq.disk import sha256_of

    sums = {**checked_files.recorded_sums(folder), name: sha256_of(folder / name)}
    (folder / checked_files.SUMS_NAME).write_text(checked_files.sums_text(sums))
