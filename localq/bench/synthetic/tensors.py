"""Tensors of random numbers, each made when it is read, and the same every time."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from localq.formats.checkpoint import TensorInfo, info

SPREAD = 0.1  # scales lie within this share of their mean
_BIG = 2**16  # elements; smaller tensors are made on the CPU
_SLAB = 2**25  # elements

# (shape, type, generator) -> the tensor, on the device of the generator where nothing else is said
Recipe = Callable[[tuple[int, ...], torch.dtype, Generator], Tensor]


@dataclass(frozen=True)
class Part:
    """A tensor that is yet to be made: what it is, and how."""

    info: TensorInfo
    make: Recipe


def part(dtype: torch.dtype, shape: tuple[int, ...], make: Recipe) -> Part:
    """`Part`, by its type and shape."""
    return Part(info(dtype, shape), make)


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


def around_8(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    """Eight codes of 4 bits in each int32, 8 for every 0: their mean is 8, which 0 to 15 miss by half a step.

    A mean that is not zero adds up along wide matrices: qwen3-32b in AWQ overflowed float16 at its first token.
    """
    words = codes(shape, dtype, generator)
    some = (words | words >> 1 | words >> 2 | words >> 3) & 0x11111111  # of each code: is it not 0?
    return words | (some ^ 0x11111111) << 3


def order(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
    """0 .. n-1 in random order, the low bits of each."""
    return torch.randperm(*shape, device=generator.device, generator=generator).to(dtype)


def filled(value: float) -> Recipe:
    """One value everywhere, on the CPU."""
    return lambda shape, dtype, generator: torch.full(shape, value, dtype=dtype)


def constant(tensor: Tensor) -> Recipe:
    """That tensor."""
    return lambda shape, dtype, generator: tensor


class RandomTensors:
    """See `checkpoint.Source`."""

    def __init__(self, parts: Mapping[str, Part], device: torch.device, seed: int) -> None:
        self._parts, self._device, self._seed = parts, device, seed

    def read(self, name: str) -> Tensor:
        """On the device; on the CPU what is small, constant, or made `on_host`."""
        wanted = self._parts[name]
        shape, dtype = wanted.info.shape, getattr(torch, wanted.info.dtype)
        device = self._device if math.prod(shape) >= _BIG else torch.device("cpu")
        generator = Generator(device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        return wanted.make(shape, dtype, generator)

    def close(self) -> None:
        """Nothing is open."""
