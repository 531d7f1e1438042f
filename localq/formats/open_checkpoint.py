"""Checkpoints from files: safetensors shards, or a .gguf file. Reading only.

Every header and the index are checked before the first tensor is read (`safetensors_headers`), and the data is read by
that header (`tensor_files`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.extra_tensors import extra_tensors, is_of_mtp_block
from localq.files.gguf import reader
from localq.files.json_files import DAMAGED
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import (
    INDEX_NAME,
    SINGLE_NAME,
    Header,
    read_header,
    read_index,
    shard_paths,
    unread_tensors,
)
from localq.formats import fp8_source
from localq.formats.checkpoint import Checkpoint, TensorInfo, TensorSource, info
from localq.formats.fp8_source import Fp8Source
from localq.formats.gguf_source import GgufSource
from localq.formats.tensor_files import DTYPES, TensorFile, each_tensor

Part = Literal["text", "mtp", "both"]


def open_checkpoint(
    files: ModelFiles, *, mapped: bool = False, packed: bool = False, part: Part = "text"
) -> Checkpoint:
    """The weights of `files`; mapped: see `tensor_files`; packed: matrices of a .gguf file (`gguf_source`) and in FP8
    as stored, else dequantized; part: those of the text model, of its MTP block (none without one), or of both.

    Raises LocalqError (exit 8) for anything unsound in a header or in the index.
    """
    return (
        _open_gguf(files, packed=packed, part=part)
        if files.kind == "gguf"
        else _open_safetensors(files, mapped=mapped, packed=packed, part=part)
    )


class _SafetensorsFiles:
    """Tensors in safetensors files, all opened with the first tensor: files that are removed later are still read."""

    def __init__(self, owner: dict[str, Header], *, mapped: bool) -> None:
        self._owner, self._mapped = owner, mapped
        self._open: dict[Path, TensorFile] = {}

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        return self._file(name).read(name)

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor in `dtype`, converted some rows at a time."""
        return self._file(name).read_as(name, dtype)

    def _file(self, name: str) -> TensorFile:
        if not self._open:
            headers = {header.path: header for header in self._owner.values()}
            self._open = {path: TensorFile(header, mapped=self._mapped) for path, header in headers.items()}
        return self._open[self._owner[name].path]

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


def _open_safetensors(files: ModelFiles, *, mapped: bool, packed: bool, part: Part) -> Checkpoint:
    headers = {shard: read_header(path) for shard, path in shard_paths(files.path).items()}
    tensors, owner = _joined(files.path, headers)
    source = _SafetensorsFiles({name: headers[shard] for name, shard in owner.items()}, mapped=mapped)
    return _part_of(files, tensors, source, packed=packed, part=part)


def open_fetched(files: ModelFiles, headers: dict[str, Header], path_of: Callable[[str], Path]) -> Checkpoint:
    """The weights of `files` whose shards are on the disk only while they are read: `path_of` a shard says where.

    headers: those expected of every shard. Raises LocalqError (exit 8), also while reading, if a header differs.
    """
    tensors, owner = _joined(files.path, headers)
    return _part_of(files, tensors, _Fetched(owner, headers, path_of))


def _part_of(
    files: ModelFiles,
    tensors: dict[str, TensorInfo],
    source: TensorSource,
    *,
    packed: bool = False,
    part: Part = "text",
) -> Checkpoint:
    """The tensors of the text model, of the MTP block, or of both."""
    extra = extra_tensors([*tensors, *unread_tensors(files.path)], files.text_config.get("num_hidden_layers"))
    left = {name for names in extra.values() for name in names}
    block = {name for name in tensors if is_of_mtp_block(name)} if part != "text" else set()
    kept = {name: each for name, each in tensors.items() if name in block or (part != "mtp" and name not in left)}
    if block:
        others = ((kind, [name for name in names if name not in block]) for kind, names in extra.items())
        extra = {kind: names for kind, names in others if names}
    if files.quantization.get("quant_method") == fp8_source.METHOD:
        found = fp8_source.find(kept, files.quantization, files.name)
        if packed:
            found = {name: matrix for name, matrix in found.items() if not fp8_source.is_linear(kept, name)}
        idle = fp8_source.idle_tensors(kept, found) if packed else {name for name in kept if fp8_source.is_extra(name)}
        source = Fp8Source(source.read, source.close, found)
        kept = {
            name: info(torch.bfloat16, each.shape) if name in found else each
            for name, each in kept.items()
            if name not in idle
        }
    return Checkpoint(kept, source, files.quantization, files.config, extra)


class _Fetched:
    """Tensors in shards that are on the disk only while they are read."""

    def __init__(self, owner: dict[str, str], headers: dict[str, Header], path_of: Callable[[str], Path]) -> None:
        self._owner, self._headers, self._path_of = owner, headers, path_of

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        shard = self._owner[name]
        header = read_header(self._path_of(shard))
        if header.tensors != self._headers[shard].tensors:
            raise bad_file(str(header.path), "the tensors do not match the header on the hub", DAMAGED)
        (tensor,) = (tensor for _, tensor in each_tensor(header, (name,)))
        return tensor

    def close(self) -> None:
        """Nothing stays open."""


def _joined(folder: Path, headers: dict[str, Header]) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """All tensors, and the shard of each; headers by shard."""
    owner: dict[str, str] = {}
    for shard, header in headers.items():
        for name in header.tensors:
            if name in owner:
                raise bad_file(str(folder), f"tensor {name[:80]!r} is in two shards, one of them {shard}", DAMAGED)
            owner[name] = shard
    if SINGLE_NAME not in headers:
        _check_index(folder, headers)
    tensors = {}
    for name, shard in owner.items():
        entry = headers[shard].tensors[name]
        tensors[name] = TensorInfo(str(DTYPES[entry.dtype]).removeprefix("torch."), entry.shape, entry.nbytes)
    return tensors, owner


def _check_index(folder: Path, headers: dict[str, Header]) -> None:
    """Every tensor that the index names must be in the shard that it names."""
    for name, shard in read_index(folder).items():
        if name not in headers[shard].tensors:
            why = f"{INDEX_NAME} maps tensor {name[:80]!r} to {shard}, which does not contain it"
            raise bad_file(str(folder), why, DAMAGED)


def _open_gguf(files: ModelFiles, *, packed: bool, part: Part) -> Checkpoint:
    model = reader.read_header(files.path)
    if part != "text":
        text = model.tensors if part == "both" else {}
        model = replace(model, tensors={**text, **model.mtp}, extra={} if model.mtp else model.extra)
    source = GgufSource(model, packed=packed)
    tensors = {name: info(dtype, shape) for name, (dtype, shape) in source.describe().items()}
    return Checkpoint(tensors, source, config=files.config, extra=model.extra)
