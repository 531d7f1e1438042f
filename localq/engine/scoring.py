"""Logits of every token of a given text, for evaluation: by prefill passes, or by single decode steps.

A text is fed from position 0 on, some tokens at a time, and overwrites the cache. Ids only.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from localq.engine.cache import KVCache
from localq.engine.load.load import LoadedModel
from localq.engine.sampler import SamplerState
from localq.engine.step import fused
from localq.engine.step.fused import FusedStep
from localq.engine.step.state import StepState
from localq.planner import footprint

LOGIT_BYTES = 128 * 2**20  # limit of the f32 logits of one pass


class LogitSource(Protocol):
    """A source of logits: prefill passes or decode steps."""

    def logits(self, ids: list[int], first: int) -> Tensor:
        """Return logits f32 [T, vocab], after the model's soft cap, for `ids` at the positions from `first`.

        Earlier calls have fed the positions before `first`. The next call may overwrite the result.
        """
        ...


def rows_at_a_time(vocab: int) -> int:
    """Return the number of tokens whose logits are held at a time: a power of two, at most a prefill pass."""
    fit = max(1, LOGIT_BYTES // (4 * vocab))
    return min(footprint.PREFILL_CHUNK, 1 << (fit.bit_length() - 1))


class Prefill:
    """Passes of many tokens, as for a prompt: as many as the cache has room for. Uses the cache of the model."""

    def __init__(self, model: LoadedModel, length: int | None = None) -> None:
        """Feed texts of `length` tokens; None: as long as the context."""
        self._model, self._length = model, length or model.ctx

    @torch.inference_mode()
    def logits(self, ids: list[int], first: int) -> Tensor:
        """Run prefill passes."""
        model, most = self._model, self._model.cache.longest_pass
        model.model.choose_length(self._length)
        if first == 0:
            model.cache.begin()
        passes = [self._pass(ids[at : at + most], first + at) for at in range(0, len(ids), most)]
        return passes[0] if len(passes) == 1 else torch.cat(passes)

    def _pass(self, ids: list[int], first: int) -> Tensor:
        model, end = self._model, first + len(ids)
        model.cache.make_room(first, len(ids))
        tokens = torch.tensor(ids, dtype=torch.int64).to(model.device)
        positions = torch.arange(first, end, dtype=torch.int64, device=model.device)
        logits: Tensor = model.model(tokens, positions, model.cache, end, last_only=False)
        return logits


class Decode:
    """Decode steps with given tokens, as for a reply, with a separate cache.

    On a GPU the launches of the fused step one by one, bit for bit those of the captured graph; else the modules.
    """

    def __init__(self, model: LoadedModel, length: int | None = None) -> None:
        """Allocate a cache and the buffers of a step. length: as for `Prefill`."""
        self._model, self._length = model, length or model.ctx
        cache = model.cache
        self._cache = KVCache(cache.layout, model.ctx, model.dtype, model.device, cache.bits, cache.chunk)
        self._state = StepState(SamplerState(model.vocab, model.ctx, model.device), model.device)
        runs_fused = model.device.type == "cuda" and not fused.why_not(model.model, model.cache.bits)
        self._fused = FusedStep(model.model, self._cache, self._state) if runs_fused else None

    @torch.inference_mode()
    def logits(self, ids: list[int], first: int) -> Tensor:
        """Run one step per token."""
        self._model.model.choose_length(self._length)
        out = torch.empty(len(ids), self._model.vocab, dtype=torch.float32, device=self._model.device)
        if first == 0:
            self._cache.begin()
        for row, id in enumerate(ids):
            self._cache.make_room(first + row, 1)
            self._state.rewind(first + row)
            self._state.token.fill_(id)
            out[row] = self._step(first + row)
        return out

    def _step(self, position: int) -> Tensor:
        """Run the step that the state describes, at `position`; returns logits f32 [vocab]."""
        if self._fused is None:
            logits: Tensor = self._model.model(self._state.token, self._state.position, self._cache, position + 1)
            return logits[0]
        self._fused.run(greedy=True)
        raw, cap = self._fused.logits[0], self._fused.softcap
        return torch.tanh(raw / cap) * cap if cap else raw
