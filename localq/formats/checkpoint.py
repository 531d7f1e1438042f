"""The weights of a model, by name: one interface over safetensors shards and a .gguf file. Reading only.

Every header and the index are checked before the first tensor is read (`safetensors_headers`), and the data is read by
that header (`tensor_files`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.extra_tensors import extra_tensors
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
from localq.formats.fp8_source import Fp8Source
from localq.formats.gguf_source import GgufSource
from localq.formats.tensor_files import DTYPES, TensorFile, each_tensor


@dataclass(frozen=True)
class TensorInfo:
    """dtype is torch's name without "torch." ("bfloat16"); nbytes as `Checkpoint.read` returns it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TensorSource(Protocol):
    """Where a `Checkpoint` reads from."""

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        ...

    def close(self) -> None:
        """Free the files."""
        ...


class Checkpoint:
    """All tensors of a model. `tensors` is known at once; `read` gives one of them, on the CPU, in its own dtype.

    For formats whose tensors do not say everything:
    quantization  config.json's quantization_config; {} without one
    config        config.json, for GGUF the same keys from its header; {} without one
    extra         kind -> names of tensors in the files that are left out (`files.extra_tensors`)
    """

    def __init__(
        self,
        tensors: dict[str, TensorInfo],
        source: TensorSource,
        quantization: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        extra: dict[str, list[str]] | None = None,
    ) -> None:
        self.tensors = tensors
        self.extra = extra or {}
        self.quantization = quantization or {}
        self.config = config or {}
        self._source = source

    @property
    def converts(self) -> bool:
        """Whether reading a tensor may dequantize it (GGUF, FP8)."""
        return isinstance(self._source, GgufSource | Fp8Source)

    def read(self, name: str) -> Tensor:
        """The tensor `name`; GGUF tensors outside blocks come as float32, and FP8 ones as bfloat16.

        Raises LocalqError (exit 8) without such a tensor. It may be a view of the mapped file: do not write to it.
        """
        if name not in self.tensors:
            raise bad_file(name, "the checkpoint contains no tensor with this name", DAMAGED)
        return self._source.read(name)

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor `name` in `dtype`, contiguous, in memory of its own. Raises LocalqError as `read` does.

        Tensors in files are converted some rows at a time, so that a matrix never exists whole in its own type.
        """
        source = self._source
        if (
            isinstance(source, GgufSource | _SafetensorsFiles | Fp8Source) and name in self.tensors
        ):  # else `read` says what is wrong
            return source.read_as(name, dtype)
        return self.read(name).to(dtype, copy=True, memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Free the files; tensors already read stay valid."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(files: ModelFiles, *, mapped: bool = False, packed: bool = False) -> Checkpoint:
    """The weights of `files`; mapped: see `tensor_files`; packed: matrices of a .gguf file in blocks (`gguf_source`).

    Raises LocalqError (exit 8) for anything unsound in a header or in the index.
    """
    return _open_gguf(files, packed=packed) if files.kind == "gguf" else _open_safetensors(files, mapped=mapped)


def info(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    """The description of a tensor of this type and shape."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return TensorInfo(str(dtype).removeprefix("torch."), shape, nbytes)


# ---- safetensors


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


def _open_safetensors(files: ModelFiles, *, mapped: bool) -> Checkpoint:
    headers = {shard: read_header(path) for shard, path in shard_paths(files.path).items()}
    tensors, owner = _joined(files.path, headers)
    source = _SafetensorsFiles({name: headers[shard] for name, shard in owner.items()}, mapped=mapped)
    return _without_extra(files, tensors, source)


def open_fetched(files: ModelFiles, headers: dict[str, Header], path_of: Callable[[str], Path]) -> Checkpoint:
    """The weights of `files` whose shards are on the disk only while they are read: `path_of` a shard says where.

    `headers` of all of them, as they will be. Raises LocalqError (exit 8), also while reading: for other headers.
    """
    tensors, owner = _joined(files.path, headers)
    return _without_extra(files, tensors, _Fetched(owner, headers, path_of))


def _without_extra(files: ModelFiles, tensors: dict[str, TensorInfo], source: TensorSource) -> Checkpoint:
    extra = extra_tensors([*tensors, *unread_tensors(files.path)], files.text_config.get("num_hidden_layers"))
    left = {name for names in extra.values() for name in names}
    kept = {name: each for name, each in tensors.items() if name not in left}
    if files.quantization.get("quant_method") == fp8_source.METHOD:
        found = fp8_source.find(kept, files.quantization, files.name)
        source = Fp8Source(source.read, source.close, found)
        kept = {
            name: info(torch.bfloat16, each.shape) if name in found else each
            for name, each in kept.items()
            if not fp8_source.is_extra(name)
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
            raise bad_file(str(header.path), "its tensors do not match its header on the Hub", DAMAGED)
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
                raise bad_file(str(folder), f"tensor {name[:80]!r} is in two shards, one of which is {shard}", DAMAGED)
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


# ---- tensors in memory


class _TensorTable:
    """Tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        return self._tensors[name]

    def close(self) -> None:
        """Nothing to free."""


def in_memory(tensors: dict[str, Tensor], config: dict[str, Any]) -> Checkpoint:
    """Tensors that are there already, as a checkpoint."""
    described = {name: info(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return Checkpoint(described, _TensorTable(tensors), None, config)


# ---- GGUF


def _open_gguf(files: ModelFiles, *, packed: bool) -> Checkpoint:
    model = reader.read_header(files.path)
    source = GgufSource(model, packed=packed)
    tensors = {name: info(dtype, shape) for name, (dtype, shape) in source.describe().items()}
    return Checkpoint(tensors, source, config=files.config, extra=model.extra)
