"""Write a checkpoint as safetensors shards, one tensor in memory at a time, so that a kill loses at most one shard.

The layout of every shard is known before its first byte (`plan_shards`), so tensors are written where they belong as
they are made. A shard is written as `<name>.part`, synced, renamed, and only then recorded in `STATE_NAME` with its
size and sha256; the index is written after the last shard, then the hashes of all files (`checked_files`), by which
`localq verify` and every load find damage. The same input gives the same bytes, resumed or not.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from localq.disk import check_free, disk_errors, part_file, sha256_of, sync_folder
from localq.files import checked_files
from localq.files.hub.layout import SMALL_FILES
from localq.files.json_files import read_object
from localq.files.model_folder import STATE_NAME
from localq.files.publish.record import RECORD_NAME
from localq.files.safetensors_headers import INDEX_NAME, SINGLE_NAME
from localq.formats.checkpoint import TensorInfo
from localq.formats.tensor_files import DTYPES

SHARD_BYTES = 5_000_000_000  # what transformers writes; small enough for every file system and every resume
MAX_STATE_BYTES = 2**20
_FORMAT_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """A file to be written: its name and its tensors in the order of their bytes."""

    name: str
    tensors: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors (the header comes on top)."""
        return sum(info.nbytes for info in self.tensors.values())


def plan_shards(groups: Iterable[dict[str, TensorInfo]], shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Distribute `groups` in their order; a group stays together, a shard holds at most `shard_bytes` or one group."""
    bins: list[dict[str, TensorInfo]] = []
    used = 0
    for group in groups:
        size = sum(info.nbytes for info in group.values())
        if not bins or (bins[-1] and used + size > shard_bytes):
            bins.append({})
            used = 0
        bins[-1].update(group)
        used += size
    if len(bins) == 1:
        return [Shard(SINGLE_NAME, _order(bins[0]))]
    return [
        Shard(f"model-{index:05d}-of-{len(bins):05d}.safetensors", _order(tensors))
        for index, tensors in enumerate(bins, 1)
    ]


def _order(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Wide types first, so that every tensor is aligned to its own type within the file; then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-getattr(torch, item[1].dtype).itemsize, item[0])))


class ShardWriter:
    """Writes `shards` into `folder`. `job` identifies what is being written: only the same job is resumed.

    drafts: intermediate shards, which `finish` deletes.
    """

    def __init__(self, folder: Path, shards: list[Shard], job: dict[str, Any], drafts: Sequence[Shard] = ()) -> None:
        self._folder = folder
        self._shards, self._drafts = shards, drafts
        self._job = job
        self._finished = self._verify(load_state(folder))

    def _verify(self, state: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return the recorded shards of this job whose files match their record."""
        if state is None or state.get("job") != self._job:
            return {}
        records = state.get("finished")
        finished: dict[str, dict[str, Any]] = {}
        for shard in (*self._shards, *self._drafts):
            record, path = records.get(shard.name) if isinstance(records, dict) else None, self._folder / shard.name
            if isinstance(record, dict) and path.is_file() and path.stat().st_size == record.get("bytes"):
                if sha256_of(path) != record.get("sha256"):
                    continue
                finished[shard.name] = record
        return finished

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self._folder

    def pending(self) -> list[Shard]:
        """Return the shards that are not yet written, drafts included."""
        left = [shard for shard in self._shards if shard.name not in self._finished]
        return left + [draft for draft in self._drafts if left and draft.name not in self._finished]

    def finished_files(self) -> dict[str, Path]:
        """Return tensor name -> file of the finished shards."""
        done = [shard for shard in self._shards if shard.name in self._finished]
        return {name: self._folder / shard.name for shard in done for name in shard.tensors}

    def check_space(self) -> None:
        """Raises LocalqError (exit 9) when the pending shards will not fit on the disk. Makes the folder."""
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for shard in self.pending():
                _part(self._folder / shard.name).unlink(missing_ok=True)  # left by a kill; about to be written again
        check_free(self._folder, sum(shard.nbytes for shard in self.pending()), str(self._folder))

    def write(self, shard: Shard, tensors: Iterable[tuple[str, Tensor | Iterable[Tensor]]]) -> None:
        """Write one shard; `tensors` yields each of its tensors once, in any order, on the CPU, whole or as rows."""
        header, offsets = _header(shard)
        path = self._folder / shard.name
        missing = set(shard.tensors)
        with disk_errors(self._folder), part_file(_part(path)) as file:
            file.write(header)
            for name, tensor in tensors:
                missing.remove(name)
                file.seek(offsets[name])
                _write_tensor(file, name, [tensor] if isinstance(tensor, Tensor) else tensor, shard.tensors[name])
            if missing:
                raise ValueError(f"tensors of {shard.name} were not given: {sorted(missing)[:3]}")
            file.flush()
            os.fsync(file.fileno())
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with disk_errors(self._folder):
            _place(path)
        self._finished[shard.name] = {"bytes": size, "sha256": digest}
        state = {"job": self._job, "finished": self._finished}
        write_file(self._folder / STATE_NAME, json.dumps(state, indent=1).encode())

    def finish(self) -> None:
        """Write the index (for more than one shard) and the hashes; delete drafts and state.

        Then the checkpoint is complete. The small files must be there.
        """
        with disk_errors(self._folder):
            for draft in self._drafts:
                (self._folder / draft.name).unlink(missing_ok=True)
        if len(self._shards) > 1:
            weight_map = {name: shard.name for shard in self._shards for name in shard.tensors}
            total = sum(shard.nbytes for shard in self._shards)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            write_file(self._folder / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
        with disk_errors(self._folder):
            sums = {shard.name: str(self._finished[shard.name]["sha256"]) for shard in self._shards}
            names = [path.name for path in self._folder.iterdir()]
            small = [name for name in names if name == RECORD_NAME or SMALL_FILES.fullmatch(name)]
            index_name = [INDEX_NAME] if len(self._shards) > 1 else []
            sums |= {name: sha256_of(self._folder / name) for name in (*small, *index_name)}
        write_file(self._folder / checked_files.SUMS_NAME, checked_files.sums_text(sums).encode())
        with disk_errors(self._folder):
            checked_files.remember(self._folder, sums)
            (self._folder / STATE_NAME).unlink(missing_ok=True)


def load_state(folder: Path) -> dict[str, Any] | None:
    """Return the record of an unfinished conversion in `folder`, None without one."""
    path = folder / STATE_NAME
    return read_object(path, MAX_STATE_BYTES) if path.is_file() else None


def start_state(folder: Path, job: dict[str, Any]) -> None:
    """Record that `job` writes into `folder`, before its first byte, so that a kill within the first shard resumes."""
    if load_state(folder) is None:
        write_file(folder / STATE_NAME, json.dumps({"job": job, "finished": {}}, indent=1).encode())


def _header(shard: Shard) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the data, and each tensor's offset in the file."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, info in shard.tensors.items():
        span = [position, position + info.nbytes]
        fields[name] = {"dtype": _FORMAT_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": span}
        position += info.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the data begins at a multiple of 8
    offsets = {name: 8 + len(text) + fields[name]["data_offsets"][0] for name in shard.tensors}
    return struct.pack("<Q", len(text)) + text, offsets


def _write_tensor(file: BinaryIO, name: str, parts: Iterable[Tensor], info: TensorInfo) -> None:
    """Write a tensor, given as rows in parts, at the position of `file`."""
    rows = 0
    for part in parts:
        shape = tuple(part.shape)
        if str(part.dtype) != f"torch.{info.dtype}" or shape[1:] != info.shape[1:] or len(shape) != len(info.shape):
            raise ValueError(f"{name} was planned as {info} and came as {part.dtype} {shape}")
        file.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        rows += shape[0] if shape else 0
    if info.shape and rows != info.shape[0]:
        raise ValueError(f"{name} was planned as {info} and came with {rows} rows")


# ---- durable files


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that after a crash there is the old content or the new, never a part."""
    with disk_errors(path.parent):
        with part_file(_part(path)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _place(path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _place(path: Path) -> None:
    """Give the synced part its final name, durably."""
    os.replace(_part(path), path)
    sync_folder(path.parent)
