"""Replies that repeat themselves: states to choose from, for self-test and bench, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.constraint import mask_words
from localq.engine.sampler import SamplerState, repeated_lengths
from localq.sampling import Sampling

WORDS = 12  # tokens that a prompt is made of: few, so that much of it stands there twice
DRY = Sampling(repeat_penalty=1.2, dry_multiplier=0.8, dry_allowed_length=1)


def prompt_of(length: int, vocab: int) -> Tensor:
    """i64 [length] of WORDS tokens, spread over the vocabulary; its last 20 stand in front of it too."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(WORDS, (length,), generator=generator) * (vocab // WORDS)
    prompt[:20] = prompt[-20:].clone()
    return prompt


def mask_of(vocab: int) -> Tensor:
    """i32 [ceil(vocab / 32)]: about every second token is allowed."""
    return torch.randint(-(2**31), 2**31, (mask_words(vocab),), generator=torch.Generator().manual_seed(4)).int()


def states_of(vocab: int, length: int, device: torch.device) -> tuple[SamplerState, SamplerState]:
    """A reply behind a prompt of `length` tokens with DRY and a mask: on the CPU, and on `device`, where nothing of it
    has been found out yet."""
    states = SamplerState(vocab, length, torch.device("cpu")), SamplerState(vocab, length, device)
    for state in states:
        state.reset(DRY, prompt_of(length, vocab), 1, breakers=[vocab // WORDS, vocab - 1])
        state.allow(mask_of(vocab))
    return states


def found(states: tuple[SamplerState, SamplerState]) -> SamplerState:
    """The second of `states` with what `dry_match` finds, as the reference finds it."""
    states[1].matches.copy_(repeated_lengths(states[0]))
    return states[1]
