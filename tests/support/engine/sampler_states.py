"""Logits and states of the sampler behind one prompt, on the CPU."""

from __future__ import annotations

import torch

from localq.engine.sampler import SamplerState
from localq.sampling import Sampling

VOCAB = 997
PROMPT = torch.tensor([3, 11, 11, 500, 996])


def state_of(sampling: Sampling, steps: int = 7, vocab: int = VOCAB) -> SamplerState:
    state = SamplerState(vocab, 64, torch.device("cpu"))
    state.reset(sampling, PROMPT % vocab, steps)
    return state


def logits_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, generator=generator) * 4
