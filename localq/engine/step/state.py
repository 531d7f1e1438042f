"""One decode step on fixed buffers: a token in, the next token out, everything kept on the device.

The step feeds itself: it writes the token it chose, the next position and the sampler's history where the next step
reads them, so that nothing but one id has to come back to the host. On a GPU the step is `fused.FusedStep`, where its
kernels serve; `ModuleStep` is the reference, and what runs on the CPU and in float32. Ids only.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from localq.engine.cache import KVCache
from localq.engine.sampler import SamplerState, sample
from localq.kernels import logit_adjust, sampling
from localq.models.decoder import Decoder


class StepState:
    """What one step hands to the next: token i64 [1], position i64 [1], chosen i64 [1] (NON_FINITE included)."""

    def __init__(self, sampler: SamplerState, device: torch.device) -> None:
        self.sampler = sampler
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(1, dtype=torch.int64, device=device)

    def choose(self, logits: Tensor, greedy: bool, softcap: float = 0.0) -> None:
        """Choose from logits f32 [vocab], make the choice the next input, and move on by one position.

        `softcap`: cap * tanh(logits / cap) first, 0 = off (the module path has done it). No host synchronisation. On a
        GPU, DRY and a mask write over the logits.
        """
        if logits.is_cuda:
            adjusted = self.sampler.dry or self.sampler.masked
            if self.sampler.dry:
                logit_adjust.dry_match(self.sampler, self.token)
            if adjusted:
                logit_adjust.adjust(logits, self.sampler, softcap=softcap)
            sampling.sample(
                logits,
                self.sampler,
                greedy=greedy,
                softcap=0.0 if adjusted else softcap,
                adjusted=adjusted,
                chosen=self.chosen,
                token=self.token,
                position=self.position,
            )
            return
        capped = torch.tanh(logits / softcap) * softcap if softcap else logits
        self.chosen.copy_(sample(capped, self.sampler, greedy))
        self.token.copy_(self.chosen.clamp(min=0))  # NON_FINITE ends the reply; until then it must stay an index
        self.sampler.advance(self.token)
        self.position.add_(1)

    def rewind(self, position: int = 0) -> None:
        """Token 0 at `position`, step 0 of a reply: warm-up runs and measurements start there."""
        self.position.fill_(position)
        self.token.zero_()
        self.sampler.rewind()

    def bytes(self) -> int:
        """Device memory of the buffers, the sampler's included."""
        return self.sampler.bytes() + 3 * self.token.element_size()


class ModuleStep:
    """A step through the modules of the model: one pass of one token, and a choice."""

    def __init__(self, model: Decoder, cache: KVCache, state: StepState) -> None:
        self.model, self.cache, self.state = model, cache, state
        self._logits: Tensor | None = None

    def forward(self, live: int) -> None:
        """Feed the token at its position, which is below `live`. No host synchronisation."""
        self._logits = self.model(self.state.token, self.state.position, self.cache, live)[0]

    def choose(self, greedy: bool) -> None:
        """Choose the next token, after `forward`. No host synchronisation."""
        assert self._logits is not None
        self.state.choose(self._logits, greedy)
        self._logits = None


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
