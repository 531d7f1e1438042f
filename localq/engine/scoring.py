"""The logits of every token of a given text, for judging a model: by prefill passes, or by single decode steps.

A text is fed from position 0 on, some tokens at a time, and what the cache held before is written over. Ids only.
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

LOGIT_BYTES = 128 * 2**20  # the most that the f32 logits of one pass take


class Source(Protocol):
    """Where logits come from."""

    def logits(self, ids: list[int], first: int) -> Tensor:
        """Tokens `ids` at the positions from `first` on -> logits f32 [T, vocab], behind the soft cap of the model.

        The positions before `first` were fed by earlier calls. The result may be written over by the next call.
        """
        ...


def rows_at_a_time(vocab: int) -> int:
    """Tokens whose logits are held at a time: a power of two, no more than a prefill pass has."""
    fit = max(1, LOGIT_BYTES // (4 * vocab))
    return min(footprint.PREFILL_CHUNK, 1 << (fit.bit_length() - 1))


class Prefill:
    """Passes of many tokens: the path that a prompt takes. Uses the cache of the model."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def logits(self, ids: list[int], first: int) -> Tensor:
        """See `Source`."""
        model, end = self._model, first + len(ids)
        tokens = torch.tensor(ids, dtype=torch.int64).to(model.device)
        positions = torch.arange(first, end, dtype=torch.int64, device=model.device)
        logits: Tensor = model.model(tokens, positions, model.cache, end, last_only=False)
        return logits


class Decode:
    """One step per token, the token given instead of chosen: the path that a reply takes, with a cache of its own.

    On a GPU the launches of the fused step, one by one, which give the bits of the captured graph; else the modules.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Allocates a cache and the buffers of a step."""
        self._model = model
        self._cache = KVCache(model.model.kv_layout(), model.ctx, model.dtype, model.device, model.kv_bits)
        self._state = StepState(SamplerState(model.vocab, model.ctx, model.device), model.device)
        runs_fused = model.device.type == "cuda" and not fused.why_not(model.model)
        self._fused = FusedStep(model.model, self._cache, self._state) if runs_fused else None

    @torch.inference_mode()
    def logits(self, ids: list[int], first: int) -> Tensor:
        """See `Source`."""
        out = torch.empty(len(ids), self._model.vocab, dtype=torch.float32, device=self._model.device)
        for row, id in enumerate(ids):
            self._state.rewind(first + row)
            self._state.token.fill_(id)
            out[row] = self._step(first + row)
        return out

    def _step(self, position: int) -> Tensor:
        """The token of the state at `position`, which it holds too -> logits f32 [vocab]."""
        if self._fused is None:
            logits: Tensor = self._model.model(self._state.token, self._state.position, self._cache, position + 1)
            return logits[0]
        self._fused.run(greedy=True)
        raw, cap = self._fused.logits[0], self._fused.softcap
        return torch.tanh(raw / cap) * cap if cap else raw
