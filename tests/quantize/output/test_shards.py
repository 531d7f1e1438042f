"""Tensors of a shard that come whole, and in rows: the same file, and what does not make up a tensor is a bug."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.files import checked_files
from localq.formats.checkpoint import info
from localq.quantize.output.shards import ShardWriter, plan_shards

TENSORS = {
    "table": torch.arange(35, dtype=torch.float16).view(7, 5),
    "norm": torch.arange(9, dtype=torch.float32),
    "number": torch.tensor(3, dtype=torch.int64),
}


def written(folder: Path, tensors: dict[str, object]) -> bytes:
    planned = {name: info(each.dtype, tuple(each.shape)) for name, each in TENSORS.items()}
    (shard,) = plan_shards([planned])
    folder.mkdir()
    ShardWriter(folder, [shard], {}).write(shard, tensors.items())
    return (folder / shard.name).read_bytes()


def test_rows_in_parts_make_the_same_file(tmp_path):
    parts = {name: iter(each.split(3)) if each.dim() else each for name, each in TENSORS.items()}
    assert written(tmp_path / "parts", parts) == written(tmp_path / "whole", TENSORS)


@pytest.mark.parametrize(
    "table",
    [
        [TENSORS["table"][:4]],
        [TENSORS["table"], TENSORS["table"][:1]],
        [TENSORS["table"].float()],
        [TENSORS["table"][:, :4]],
        [TENSORS["table"].flatten()],
        TENSORS["table"].T,
    ],
    ids=["too few rows", "too many rows", "another type", "narrower", "flat", "turned"],
)
def test_what_was_not_planned_is_not_written(tmp_path, table: list[Tensor] | Tensor):
    with pytest.raises(ValueError, match="table was planned as"):
        written(tmp_path / "out", {**TENSORS, "table": table})
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_disk_that_fails_as_the_hashes_are_recorded_is_named(tmp_path, monkeypatch):
    def fails(path: Path) -> dict[str, int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    planned = {name: info(each.dtype, tuple(each.shape)) for name, each in TENSORS.items()}
    (shard,) = plan_shards([planned])
    writer = ShardWriter(tmp_path, [shard], {})
    writer.write(shard, TENSORS.items())
    monkeypatch.setattr(checked_files, "stamp", fails)
    with pytest.raises(LocalqError, match=str(tmp_path)) as caught:
        writer.finish()
    assert caught.value.exit_code == ExitCode.DISK
