"""A constraint that follows a script, for tests of replies under one."""

from __future__ import annotations

import itertools

import torch

from localq.engine.constraint import mask_words

VOCAB = 320  # of the tiny models


def mask_of(ids, vocab: int = VOCAB) -> torch.Tensor:
    """i32 [ceil(vocab / 32)], worked out the slow way."""
    words = [0] * mask_words(vocab)
    for id in ids:
        words[id // 32] |= 1 << id % 32
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)


class Script:
    """Allows a set of ids at every step, and has stopped behind the last one; None: free. Notes the calls."""

    def __init__(self, *steps, vocab: int = VOCAB) -> None:
        self.steps, self.vocab = [None if step is None else set(step) for step in steps], vocab
        self.calls: list[object] = []
        self.taken: list[int] = []

    def free(self) -> int:
        rest = self.steps[len(self.taken) :]
        return next((count for count, step in enumerate(rest) if step is not None), len(rest))

    def mask(self) -> torch.Tensor:
        self.calls.append("mask")
        return mask_of(self.steps[len(self.taken)], self.vocab)

    def accept(self, token: int) -> None:
        allowed = self.steps[len(self.taken)]
        assert allowed is None or token in allowed
        self.calls.append(token)
        self.taken.append(token)

    @property
    def stopped(self) -> bool:
        return len(self.taken) == len(self.steps)

    def draft(self) -> list[int]:
        rest = itertools.takewhile(lambda step: step is not None and len(step) == 1, self.steps[len(self.taken) :])
        return [id for step in rest for id in step]

    def fork(self) -> Script:
        copy = Script(vocab=self.vocab)
        copy.steps, copy.taken = self.steps, list(self.taken)
        return copy
