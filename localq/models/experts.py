"""Mixtures of experts: a router sends every token through a few of many small MLPs, and weighs what they say.

Shape letters of `layers.py`, and: E experts of the layer, k of them for each token. The matrices of all experts lie
behind each other in one tensor, [E, in, out] as in transformers. Tokens are grouped by expert, so that the matrices of
one are read once for all tokens that go through it; the host has to know the groups, which a CPU has at no cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from localq.models.config import DecoderConfig


class Router(nn.Linear):
    """Logits of all experts; the largest k are chosen, and the softmax over these k alone weighs them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden, config.experts)
        self.active = config.experts_active

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> weights [T, k] that sum to 1, in the type of x, and the chosen experts int64 [T, k]."""
        logits, chosen = self(x).topk(self.active, -1)
        return torch.softmax(logits, -1), chosen


class Experts(nn.Module, ABC):
    """E MLPs: gated(x gate_up + bias) down + bias. A family says how gate and up lie in a row, and what they make."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        count, hidden, width = config.experts, config.hidden, config.intermediate
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(count, width, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden))

    @abstractmethod
    def gated(self, gate_up: Tensor) -> Tensor:
        """gate_up [rows, 2 * width] -> [rows, width]."""
        ...

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden], weights and chosen [T, k] -> the weighted sum of the chosen experts [T, hidden].

        The terms of a token are added in the order of the experts' numbers.
        """
        y = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)  # places in `chosen`, by expert
        tokens, scales = order // chosen.shape[1], weights.flatten()[order, None]
        first = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=len(self.down_proj)).tolist()):
            if not count:
                continue
            rows = tokens[first : first + count]
            gate_up = torch.addmm(self.gate_up_proj_bias[expert], x[rows], self.gate_up_proj[expert])
            said = torch.addmm(self.down_proj_bias[expert], self.gated(gate_up), self.down_proj[expert])
            y.index_add_(0, rows, said * scales[first : first + count])
            first += count
        return y


class Mixture(nn.Module):
    """The MLP of a layer with experts."""

    def __init__(self, config: DecoderConfig, experts: Experts) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out: Tensor = self.experts(x, *self.router.route(x))
        return out
