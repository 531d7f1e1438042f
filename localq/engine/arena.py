"""Arena: one allocation for many tensors, used for the KV cache and for the weights of the blocks.

Torch's allocator hands out blocks of 2 and 20 MiB and rounds large ones up: with one allocation per tensor, some models
lose 7 % of their weights and cache to unused remainders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, as torch aligns


def arena_bytes(sizes: list[int]) -> int:
    """Return the bytes of an arena for tensors of these sizes."""
    return sum(_align(size) for size in sizes)


class Arena:
    """One block of memory; it is freed with the last of its tensors."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        """Allocate `size` bytes (`arena_bytes`)."""
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor. Raises ValueError where too little is free."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._bytes.numel():
            left = self._bytes.numel() - self._used
            raise ValueError(f"arena: {left} bytes are left, {size} are needed for {list(shape)} of {dtype}")
        part = self._bytes[self._used : self._used + size]
        self._used += _align(size)
        return part.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor`, from any device."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
