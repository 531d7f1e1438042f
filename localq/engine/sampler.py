"""The next token from the logits, chosen on the device. Ids only; the settings are `localq.sampling.Sampling`.

Every setting is a small device tensor and nothing is read back, so one captured CUDA graph serves all settings. The
order and the meaning are transformers' (RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper,
TopPLogitsWarper, MinPLogitsWarper). All three filters keep a prefix of the tokens sorted by logit, and the draw walks
that prefix: the first token whose cumulated weight exceeds u * total. u comes from a table filled on the CPU, so a
seed draws the same tokens on every device. Equal logits are taken in the order of their ids.

`sample` is the reference and what the CPU runs; `kernels.sampling` does the same on a GPU.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from localq.kernels.sampling import workspace_elements
from localq.sampling import Sampling

NON_FINITE = -1  # returned in place of a token id when a logit is NaN or infinite


class SamplerState:
    """Settings and history of one reply, as tensors that keep their addresses.

    seen      bool [vocab]     tokens of the prompt and of the reply so far
    uniforms  f64  [capacity]  the random number in [0, 1) of every step
    step      i64  [1]         how many tokens the reply has
    floats    f64  [4]         temperature, top_p, min_p, repeat_penalty
    top_k     i64  [1]         vocab when off
    workspace i64  [...]       what the kernels of a GPU keep while they choose (none on the CPU)
    """

    def __init__(self, vocab: int, capacity: int, device: torch.device) -> None:
        self.vocab = vocab
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(capacity, dtype=torch.float64, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.floats = torch.ones(4, dtype=torch.float64, device=device)
        self.top_k = torch.full((1,), vocab, dtype=torch.int64, device=device)
        elements = workspace_elements(vocab) if device.type == "cuda" else 0
        self.workspace = torch.zeros(elements, dtype=torch.int64, device=device)

    def reset(self, sampling: Sampling, prompt: Tensor, steps: int) -> None:
        """Start a reply of at most `steps` tokens. prompt i64 [T] on the CPU or on the device."""
        self.step.zero_()
        self.seen.zero_()
        self.seen[prompt.to(self.seen.device)] = True
        floats = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repeat_penalty)
        self.floats.copy_(torch.tensor(floats, dtype=torch.float64))
        self.top_k.fill_(min(sampling.top_k, self.vocab) or self.vocab)
        if not sampling.greedy:
            generator = torch.Generator()
            generator.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed)
            self.uniforms[:steps].copy_(torch.rand(steps, dtype=torch.float64, generator=generator))

    def advance(self, token: Tensor) -> None:
        """Count `token` i64 [1] (an id, not NON_FINITE) as part of the reply."""
        self.seen.index_fill_(0, token, True)
        self.step.add_(1)

    def bytes(self) -> int:
        """Device memory of the tensors above."""
        tensors = (self.seen, self.uniforms, self.step, self.floats, self.top_k, self.workspace)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sample(logits: Tensor, state: SamplerState, greedy: bool) -> Tensor:
    """logits f32 [vocab] -> token i64 [1], or NON_FINITE if any logit is NaN or infinite.

    `greedy` is a host decision (its graph is much cheaper); temperature must be above 0 otherwise.
    """
    scores = penalized(logits, state)
    token = scores.argmax(dim=-1, keepdim=True) if greedy else _draw(scores, state)
    return torch.where(torch.isfinite(logits).all(), token, NON_FINITE)


def penalized(logits: Tensor, state: SamplerState) -> Tensor:
    """Logits f32 [vocab] after the repetition penalty (exactly the logits where it is 1)."""
    penalty = state.floats[3]
    return torch.where(state.seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def kept_weights(scores: Tensor, state: SamplerState) -> tuple[Tensor, Tensor]:
    """scores f32 [vocab] -> (weights f64 [vocab], ids i64 [vocab]), both by falling score.

    A weight is exp((score - largest) / temperature), 0 for tokens that top-k, top-p or min-p drop.
    """
    temperature, top_p, min_p = state.floats[0], state.floats[1], state.floats[2]
    ordered, ids = torch.sort(scores, descending=True, stable=True)
    kth = ordered.index_select(0, state.top_k - 1)
    weights = torch.exp((ordered - ordered[:1]).double() / temperature) * (ordered >= kth)
    before = weights.cumsum(0) - weights  # mass of the likelier tokens
    in_top_p = (before < top_p * weights.sum()) | (top_p >= 1)
    return weights * in_top_p * (weights >= min_p), ids


def _draw(scores: Tensor, state: SamplerState) -> Tensor:
    weights, ids = kept_weights(scores, state)
    cumulated = weights.cumsum(0)
    threshold = state.uniforms.index_select(0, state.step) * cumulated[-1:]
    place = (cumulated <= threshold).sum(0, keepdim=True).clamp(max=scores.shape[0] - 1)
    return ids.index_select(0, place)
