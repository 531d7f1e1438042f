"""A window of a KV cache that slides over the text: fixed buffers for the positions that the next tokens can see.

Slot s holds position base + s. A pass that would not fit moves what it still sees to the front, in pieces and without
an allocation, and base grows. Not a ring: the slots of a span lie together, so that attention and its masks work as in
a cache that keeps everything.

The capacity is the window and a pass of `chunk` tokens. Of that, a move for a short pass keeps up to half a chunk more
than the window, so that a conversation can go back by as much.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlidingWindow:
    """The slots of all layers with one window.

    capacity         slots: window + chunk, or a whole context if that is less
    base             the position of slot 0
    base_on_device   the same, i64 [1], for kernels
    """

    def __init__(self, window: int, chunk: int, capacity: int, device: torch.device | str) -> None:
        self.window, self.chunk, self.capacity = window, chunk, capacity
        self.base = 0
        self.base_on_device = torch.zeros(1, dtype=torch.int64, device=device)
        self._parts: list[Tensor] = []

    def add(self, parts: list[Tensor]) -> None:
        """Add the buffers of a layer, each [kv_heads, capacity, ...]."""
        self._parts += parts

    def make_room(self, first: int, count: int) -> None:
        """Make room for `count` positions from `first` on, at most `chunk` or a whole context; what they see stays.

        Where earlier positions were dropped or never written, the slots in their place hold something finite: for
        measurements.
        """
        if not self.keeps(first):
            self.restart(max(0, first - self.window + 1))
        if first + count - self.base <= self.capacity:
            return
        kept = self.window - 1 + min(self.capacity - self.window + 1 - count, self.chunk // 2)
        base = max(self.base, first - kept)
        assert first + count - base <= self.capacity
        free = self.base + self.capacity - first
        if free >= 0:  # else positions in between were never written
            self._move(base - self.base, first - base, free)
        self.restart(base)

    def keeps(self, tokens: int) -> bool:
        """True if the window of a text cut to `tokens` tokens is still there."""
        return max(0, tokens - self.window + 1) >= self.base

    def restart(self, base: int = 0) -> None:
        """Take slot 0 as position `base` from now on."""
        if base != self.base:
            self.base = base
            self.base_on_device.fill_(base)

    def slots_of(self, tokens: int) -> slice:
        """Return the slots that what follows a text of `tokens` tokens sees of it: its last window - 1."""
        return slice(tokens - min(tokens, self.window - 1) - self.base, tokens - self.base)

    def _move(self, by: int, count: int, free: int) -> None:
        """Move `count` slots to the front, by `by` slots; the last `free` slots are free."""
        step = max(by, free)
        for part in self._parts:
            for first in range(0, count, step):
                stop = min(first + step, count)
                source = part[:, first + by : stop + by]
                if stop - first > by:  # it would be read while it is written
                    source = part[:, first - stop :].copy_(source)
                part[:, first:stop].copy_(source)
