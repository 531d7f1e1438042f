"""One allocation for many tensors: the cache, and the weights of the blocks.

Torch's allocator hands out blocks of 2 and 20 MiB and rounds large ones: with a tensor each, weights and caches of some
models lose 7 % to what is left over.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, as torch aligns


def arena_bytes(sizes: list[int]) -> int:
    """Bytes of an arena for tensors of so many bytes each."""
    return sum(_aligned(size) for size in sizes)


class Arena:
    """Lives as long as one of its tensors does."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        """Allocates `size` bytes (`arena_bytes`)."""
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in what is free. Raises ValueError where that is too little."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._bytes.numel():
            left = self._bytes.numel() - self._used
            raise ValueError(f"arena: {left} bytes are left, {size} are needed for {list(shape)} of {dtype}")
        part = self._bytes[self._used : self._used + size]
        self._used += _aligned(size)
        return part.view(dtype).view(shape)

    def placed(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, from whatever device, in what is free."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
