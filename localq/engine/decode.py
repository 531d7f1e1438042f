"""One decode step on fixed buffers: a token in, the next token out, everything kept on the device.

The step feeds itself: it writes the token it chose, the next position and the sampler's history where the next step
reads them, so that nothing but one id has to come back to the host. The same function runs eagerly and inside a
captured CUDA graph (`graph.py`). Ids only.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from localq.engine.cache import KVCache
from localq.engine.sampler import SamplerState, sample
from localq.models.decoder import Decoder

SMALLEST_BUCKET = 256  # cache slots; attention over fewer costs the same


class DecodeStep:
    """The buffers of a step: token i64 [1], position i64 [1], chosen i64 [1] (NON_FINITE included)."""

    def __init__(self, model: Decoder, cache: KVCache, sampler: SamplerState, device: torch.device) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(1, dtype=torch.int64, device=device)

    def run(self, live: int, greedy: bool) -> None:
        """Feed `token` at `position`, choose the next token, and move both on. No host synchronisation."""
        logits = self.model(self.token, self.position, self.cache, live)
        self.choose(logits[0], greedy)
        self.position.add_(1)

    def choose(self, logits: Tensor, greedy: bool) -> None:
        """Choose from logits f32 [vocab] and make the choice the next input."""
        self.chosen.copy_(sample(logits, self.sampler, greedy))
        self.token.copy_(self.chosen.clamp(min=0))  # NON_FINITE ends the reply; until then it must stay an index
        self.sampler.advance(self.token)

    def rewind(self) -> None:
        """Position and step 0, as before any token: warm-up runs start there."""
        self.position.zero_()
        self.token.zero_()
        self.sampler.step.zero_()

    def bytes(self) -> int:
        """Device memory of the buffers, the sampler's included."""
        return self.sampler.bytes() + 3 * self.token.element_size()


class Readback:
    """Brings chosen ids to the host in order, without stopping the device: pinned slots, one event each."""

    def __init__(self, chosen: Tensor, slots: int = 2) -> None:
        self._chosen = chosen
        self._on_cuda = chosen.is_cuda
        self._slots = [torch.zeros(1, dtype=torch.int64, pin_memory=self._on_cuda) for _ in range(slots)]
        count = slots if self._on_cuda else 0
        self._events = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]  # torch's gap
        self._waiting: deque[int] = deque()
        self._next = 0

    def push(self) -> None:
        """Enqueue the copy of the id chosen last."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        self._slots[slot].copy_(self._chosen, non_blocking=True)
        if self._on_cuda:
            self._events[slot].record()
        self._waiting.append(slot)

    def take(self) -> int:
        """The oldest id that was pushed and not taken; waits for it."""
        slot = self._waiting.popleft()
        if self._on_cuda:
            self._events[slot].synchronize()
        return int(self._slots[slot])

    def forget(self) -> None:
        """Drop what was pushed and not taken."""
        self._waiting.clear()


def buckets(capacity: int) -> list[int]:
    """Live lengths that graphs are captured for: powers of two below `capacity`, then `capacity`.

    Attention costs at most twice what the live length needs.
    """
    lengths = []
    length = SMALLEST_BUCKET
    while length < capacity:
        lengths.append(length)
        length *= 2
    return [*lengths, capacity]


def bucket_for(length: int, lengths: list[int]) -> int:
    """The smallest bucket that holds `length` cache slots."""
    return next(bucket for bucket in lengths if bucket >= length)
