"""Models that `localq quantize` made, for tests of uploads: tiny, with a record of where they come from."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from localq.cli import execute
from localq.disk import sha256_of
from localq.files import catalog, checked_files
from localq.files.model_folder import open_model
from localq.files.publish import record as records
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint

BASE = "publisher/tiny-llama"
REVISION = "a" * 40


def make(folder: Path, format: str = "nf4", *options: str) -> Path:
    """Quantize a tiny Llama from a snapshot of `BASE` in a cache of the hub, by the command."""
    out = folder / f"tiny-llama-{format}"
    assert execute(["quantize", str(_snapshot(folder)), "--format", format, "--out", str(out), "-q", *options]) == 0
    return out


def make_in_shards(folder: Path) -> Path:
    """The same in NF4, in several files of weights."""
    files, out = open_model(_snapshot(folder)), folder / "tiny-llama-nf4"
    record = records.describe(catalog.resolve(str(files.path)), files.path, "nf4", ())
    by_tensor.convert(TensorwiseRequest(files, "nf4", out, shard_bytes=60_000, record=record))
    return out


def _snapshot(folder: Path) -> Path:
    torch.set_num_threads(1)
    found = folder / "cache" / "models--publisher--tiny-llama" / "snapshots" / REVISION
    if not found.exists():
        shutil.move(make_checkpoint(folder / "source", "llama"), found)
    return found


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
    sums = {**checked_files.recorded_sums(folder), name: sha256_of(folder / name)}
    (folder / checked_files.SUMS_NAME).write_text(checked_files.sums_text(sums))
