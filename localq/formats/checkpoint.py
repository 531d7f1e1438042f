"""The weights of a model, by name, wherever they are stored: one interface. `open_checkpoint` opens files."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.json_files import DAMAGED


@dataclass(frozen=True)
class TensorInfo:
    """dtype is torch's name without "torch." ("bfloat16"); nbytes as `Checkpoint.read` returns it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TensorSource(Protocol):
    """Source of a `Checkpoint`'s tensors. `converts` is True if reading a tensor may dequantize it."""

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        ...

    def close(self) -> None:
        """Free the files."""
        ...


@runtime_checkable
class ConvertingSource(TensorSource, Protocol):
    """One that converts some rows at a time."""

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor in `dtype`, on the CPU."""
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
        """True if reading a tensor may dequantize it (GGUF, FP8)."""
        return getattr(self._source, "converts", False)

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
        if isinstance(source, ConvertingSource) and name in self.tensors:  # else `read` says what is wrong
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


def info(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorInfo:
    """The description of a tensor of this type and shape."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return TensorInfo(str(dtype).removeprefix("torch."), shape, nbytes)


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
