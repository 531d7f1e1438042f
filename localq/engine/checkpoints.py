"""Checkpoints of a text in the cache: how a model goes back that cannot forget its last tokens.

Keys and values that grow with the context are cut anywhere. A state cannot be, and a window that has slid holds only
the last positions. So these are copied to host memory, pinned on a GPU, at lengths worth coming back to.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from localq.engine.cache import KVCache


class Checkpoints:
    """Copies of the states and windows of one text, at some of its lengths; the least recently used leave first."""

    def __init__(self, cache: KVCache, budget: int) -> None:
        """Hold at most `budget` bytes."""
        self._cache, self.budget, self.bytes = cache, budget, 0
        self._copies: dict[int, list[Tensor]] = {}  # length -> parts; the least recently used first
        self._spare: list[Tensor] = []  # buffers of the next copy

    def are_useful(self) -> bool:
        """True if the model needs checkpoints and the budget holds at least one."""
        sizes = (held_bytes(size, self._cache.is_cuda) for size in self._cache.passing_sizes())
        return 0 < sum(sizes) <= self.budget

    @property
    def lengths(self) -> list[int]:
        """The lengths that can be restored."""
        return sorted(self._copies)

    def reserve(self, tokens: int) -> None:
        """Allocate the buffers of a later `save` at this length. Call it while the device is busy: pinning is slow."""
        if self._makes_room(tokens):
            self._spare = [_host_buffer(part) for part in self._cache.passing_parts(tokens)]

    @torch.inference_mode()
    def save(self, tokens: int) -> None:
        """Copy the cache, which holds exactly a text of `tokens` tokens."""
        if tokens in self._copies:
            self._copies[tokens] = self._copies.pop(tokens)
            return
        if not self._makes_room(tokens):
            return
        parts, spare = self._cache.passing_parts(tokens), self._spare
        if [each.shape for each in spare] != [part.shape for part in parts]:
            spare = [_host_buffer(part) for part in parts]
        self._copies[tokens], self._spare = spare, []
        for part, buffer in zip(parts, spare, strict=True):
            buffer.copy_(part, non_blocking=True)
        self.bytes += self._size(parts)
        if parts[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def _makes_room(self, tokens: int) -> bool:
        """Drop others for a copy at this length; False if there is one, or the budget is too small."""
        size = self._size(self._cache.passing_parts(tokens))
        if tokens in self._copies or not 0 < size <= self.budget:
            return False
        while self.bytes + size > self.budget:
            self._drop(next(iter(self._copies)))
        return True

    @torch.inference_mode()
    def restore(self, tokens: int) -> None:
        """Put the copy of length `tokens` back."""
        copies = self._copies[tokens] = self._copies.pop(tokens)
        self._cache.place(tokens)
        for part, copy in zip(self._cache.passing_parts(tokens), copies, strict=True):
            part.copy_(copy, non_blocking=True)

    def longest(self, tokens: int) -> int:
        """Return the greatest length up to `tokens`; 0 if there is none."""
        return max((length for length in self._copies if length <= tokens), default=0)

    def cut(self, tokens: int) -> None:
        """Drop those of more than `tokens` tokens: the text goes on otherwise."""
        for length in [length for length in self._copies if length > tokens]:
            self._drop(length)

    def _drop(self, tokens: int) -> None:
        self.bytes -= self._size(self._copies.pop(tokens))

    def _size(self, parts: list[Tensor]) -> int:
        return sum(held_bytes(part.nbytes, self._cache.is_cuda) for part in parts)


def held_bytes(size: int, pinned: bool) -> int:
    """Return the bytes that a buffer of `size` bytes takes: torch rounds pinned ones up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


def _host_buffer(part: Tensor) -> Tensor:
    """Return host memory for a copy; some systems pin little (WSL2, containers), and pageable memory is only slower."""
    if part.is_cuda:
        with contextlib.suppress(RuntimeError):
            return torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return torch.empty(part.shape, dtype=part.dtype)
