"""Tensors of random numbers, each made when it is read, and the same every time."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Generator, Tensor

from localq.formats.checkpoint import TensorInfo, info

SPREAD = 0.1  # scales lie within this share of their mean
_BIG = 2**16  # elements; smaller tensors are made on the CPU
_SLAB = 2**25  # elements

# (shape, type, generator) -> the tensor, on the device of the generator by default
Recipe = Callable[[tuple[int, ...], torch.dtype, Generator], Tensor]


@dataclass(frozen=True)
class Matrix:
    """A matrix whose tensors are made together: (seed, device) -> the tensors by name."""

    name: str
    make: Callable[[int, torch.device], dict[str, Tensor]]


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor, and its recipe or the matrix that it belongs to."""

    info: TensorInfo
    make: Recipe | Matrix


def sample_specs(shapes: Mapping[str, tuple[int, int]], module: ModuleType, scheme: str) -> dict[str, TensorSpec]:
    """The tensors of matrices [out, in] in the format `module`, by full name: what its `sample` makes."""
    found: dict[str, TensorSpec] = {}
    for path, shape in shapes.items():
        matrix = Matrix(path, partial(_stored_tensors, module, path, shape, scheme))
        described = module.layout(*shape, scheme)
        found |= {path + suffix: TensorSpec(info(*each), matrix) for suffix, each in described.items()}
    return found


def _stored_tensors(
    module: ModuleType, path: str, shape: tuple[int, int], scheme: str, seed: int, device: torch.device
) -> dict[str, Tensor]:
    return {
        path + suffix: tensor for suffix, tensor in module.stored(module.sample(shape, seed, device, scheme)).items()
    }


def tensor_spec(dtype: torch.dtype, shape: tuple[int, ...], make: Recipe) -> TensorSpec:
    """A `TensorSpec`, by its type and shape."""
    return TensorSpec(info(dtype, shape), make)


def normal(deviation: float, mean: float = 0.0) -> Recipe:
    """Gaussian numbers."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
        drawn = torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).mul_(deviation)
        return drawn.add_(mean) if mean else drawn

    return make


def on_host(make: Recipe) -> Recipe:
    """The same, on the CPU, some rows at a time: what may not stay on the device is never there as a whole."""

    def in_slabs(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        rows = max(1, _SLAB // math.prod(shape[1:]))
        for first in range(0, shape[0], rows):
            slab = whole[first : first + rows]
            slab.copy_(make(tuple(slab.shape), dtype, generator))
        return whole

    return in_slabs


def scales(mean: float) -> Recipe:
    """Positive numbers around `mean`."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
        drawn = torch.rand(shape, device=generator.device, generator=generator)
        return drawn.mul_(2 * SPREAD).add_(1 - SPREAD).mul_(mean).to(dtype)

    return make


def codes(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    """Every number of an integer type, as often."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype, device=generator.device, generator=generator)


def filled(value: float) -> Recipe:
    """One value everywhere, on the CPU."""
    return lambda shape, dtype, generator: torch.full(shape, value, dtype=dtype)


def constant(tensor: Tensor) -> Recipe:
    """That tensor."""
    return lambda shape, dtype, generator: tensor


class RandomTensors:
    """A source of a `Checkpoint`: every tensor is made when it is read, and the same each time."""

    def __init__(self, parts: Mapping[str, TensorSpec], device: torch.device, seed: int) -> None:
        self._parts, self._device, self._seed = parts, device, seed
        self._matrix, self._held = "", dict[str, Tensor]()  # tensors of the matrix that was read last

    def read(self, name: str) -> Tensor:
        """On the device; on the CPU what is small, constant, or made `on_host`."""
        wanted = self._parts[name]
        if isinstance(wanted.make, Matrix):
            return self._of_matrix(wanted.make, name)
        shape, dtype = wanted.info.shape, getattr(torch, wanted.info.dtype)
        device = self._device if math.prod(shape) >= _BIG else torch.device("cpu")
        return wanted.make(shape, dtype, Generator(device).manual_seed(self._seed_of(name)))

    def _of_matrix(self, matrix: Matrix, name: str) -> Tensor:
        """Large tensors are given away: nothing of them stays here."""
        if self._matrix != matrix.name or name not in self._held:
            self._matrix, self._held = matrix.name, {}
            self._held = matrix.make(self._seed_of(matrix.name), self._device)
        if self._held[name].numel() >= _BIG:
            return self._held.pop(name)
        return self._held[name].cpu()

    def _seed_of(self, name: str) -> int:
        return zlib.crc32(f"{self._seed} {name}".encode())

    def close(self) -> None:
        """Free what is held."""
        self._matrix, self._held = "", {}
