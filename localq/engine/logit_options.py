"""Logit options of a reply: bias, penalties by count, log probabilities of the chosen tokens.

Eager launches around the choice of a token (`StepState.choose`), so a reply with any of them replays a graph of the
pass alone, and one without runs none of this code. Log probabilities come to the host with the ids of their step.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from localq.sampling import LogitOptions
from localq.stats import TokenLogprob


class RequestLogits:
    """The logit options of one reply.

    counts   f32 [vocab]     times that each token occurs in the reply
    chosen   f32 [1]         log probability of the choice
    top      f32 [n], ids i64 [n]  those of the n likeliest tokens, by descending probability
    """

    def __init__(self, options: LogitOptions, vocab: int, device: torch.device) -> None:
        """Allocate buffers. Token ids of the bias past the vocabulary are ignored."""
        known = [(id, value) for id, value in options.bias if id < vocab]
        self._options = options
        self._bias_ids = torch.tensor([id for id, _ in known], dtype=torch.int64).to(device)
        self._bias = torch.tensor([value for _, value in known], dtype=torch.float32).to(device)
        self._counts = torch.zeros(vocab if options.has_penalties else 0, dtype=torch.float32, device=device)
        self._logprobs: Tensor | None = None  # f32 [vocab], of the row that is being chosen
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []  # of the step that is being chosen
        self._sent: deque[list[tuple[Tensor, Tensor, Tensor]]] = deque()

    @classmethod
    def of(cls, options: LogitOptions | None, vocab: int, device: torch.device) -> RequestLogits | None:
        """The logit options of a reply; None where they have no effect."""
        return None if options is None or options.idle else cls(options, vocab, device)

    def apply(self, logits: Tensor, softcap: float = 0.0) -> None:
        """Apply soft cap, bias and penalties to logits f32 [vocab], in place; softcap as of `StepState.choose`."""
        if softcap:
            logits.div_(softcap).tanh_().mul_(softcap)
        options = self._options
        if options.logprobs is not None:
            self._logprobs = torch.log_softmax(logits.float(), dim=-1)
        if len(self._bias):
            logits.index_add_(0, self._bias_ids, self._bias.to(logits.dtype))
        if options.has_penalties:
            logits.sub_(options.presence_penalty * (self._counts > 0) + options.frequency_penalty * self._counts)

    def record(self, chosen: Tensor) -> None:
        """Count the choice i64 [1], which may be NON_FINITE, and keep its log probability."""
        id = chosen.clamp(min=0)
        if len(self._counts):
            self._counts.index_add_(0, id, self._counts.new_ones(1))
        if self._logprobs is not None:
            top = torch.topk(self._logprobs, min(self._options.logprobs or 0, len(self._logprobs)))
            self._rows.append((self._logprobs.index_select(0, id), top.values, top.indices))
            self._logprobs = None

    def send(self) -> None:
        """Start copying the log probabilities of a step to the host, before its ids."""
        self._sent.append([_to_host(row) for row in self._rows])
        self._rows = []

    def take(self) -> list[TokenLogprob]:
        """The log probabilities of the oldest step whose ids have come; empty where none were asked for."""
        return [
            TokenLogprob(float(chosen), tuple(zip(ids.tolist(), top.tolist(), strict=True)))
            for chosen, top, ids in self._sent.popleft()
        ]


def _to_host(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    if not tensors[0].is_cuda:
        return tensors
    staged = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for to, source in zip(staged, tensors, strict=True):
        to.copy_(source, non_blocking=True)
    return staged[0], staged[1], staged[2]
