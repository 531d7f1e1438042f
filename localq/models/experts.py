"""Mixtures of experts: a router sends every token through a few of many small MLPs, and weights their results.

Shape letters of `layers.py`, and: E experts of the layer, k of them for each token. The matrices of all experts lie
behind each other in one stack [E, out, in], on a GPU in the form of the checkpoint where that is a quantized one.
Tokens are grouped by expert, so that the matrices of one are read once for all tokens that go through it. Here the host
has to know the groups; on a GPU `Experts.grouped` needs it not (`engine.load.grouped_experts`), and decode steps go
other ways (`engine.step.fused_experts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.models.config import DecoderConfig
from localq.models.layers import ACTIVATIONS, GatedMLP, PlainLinear, product, squared_relu


class PackedStack(Protocol):
    """Matrices [E, out, in] in a quantized format; `formats.linear.SlabStack` is one."""

    def product(self, x: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]: x W^T + bias [out] with W of one expert."""
        ...


class GroupedExperts(Protocol):
    """All experts of a layer for many tokens, by kernels; `engine.load.grouped_experts` has it."""

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As `Experts.forward`."""
        ...


class Router(PlainLinear):
    """Logits of all experts, of which the k largest are chosen. In f32, whatever the dtype of the model.

    how   what weighs the chosen: "softmax_of_chosen", over their logits alone; "softmax_of_all", over all of them;
          "sigmoid" (`SigmoidRouter`)
    """

    def __init__(self, config: DecoderConfig, bias: bool = True, how: str = "softmax_of_chosen") -> None:
        super().__init__(config.hidden, config.experts, bias=bias)
        self.active, self.how = config.experts_active, how

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> weights f32 [T, k], and the chosen experts int64 [T, k]."""
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(x.float(), self.weight.float(), bias)
        if self.how == "softmax_of_all":
            return torch.softmax(logits, -1).topk(self.active, -1)
        largest, chosen = logits.topk(self.active, -1)
        return torch.softmax(largest, -1), chosen


class SigmoidRouter(Router):
    """A router that weighs by the sigmoid of each logit by itself, in f32.

    selection_bias   f32 [E], added to the sigmoids in the choice alone, or None
    epsilon          the weights of the chosen are divided by their sum, and this beside it; None: they are not
    factor           multiplies the weights
    groups           into which the experts are divided; of the `active_groups` with the largest sums of their two best
                     experts are chosen
    """

    def __init__(
        self,
        config: DecoderConfig,
        selection_bias: bool,
        epsilon: float | None,
        factor: float = 1.0,
        groups: int = 1,
        active_groups: int = 1,
    ) -> None:
        super().__init__(config, bias=False, how="sigmoid")
        self.selection_bias = nn.Parameter(torch.empty(config.experts)) if selection_bias else None
        self.epsilon, self.factor = epsilon, factor
        self.groups, self.active_groups = groups, active_groups

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> weights f32 [T, k], and the chosen experts int64 [T, k]."""
        return self.choose(F.linear(x.float(), self.weight.float()))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits f32 [T, E] -> as `route`."""
        scores = torch.sigmoid(logits)
        biased = scores if self.selection_bias is None else scores + self.selection_bias.float()
        chosen = self._eligible(biased).topk(self.active, -1)[1]
        weights = scores.gather(-1, chosen)
        if self.epsilon is not None:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon)
        return weights * self.factor, chosen

    def _eligible(self, scores: Tensor) -> Tensor:
        """Scores [T, E], -inf outside the best groups."""
        if self.active_groups == self.groups:
            return scores
        grouped = scores.view(len(scores), self.groups, -1)
        best = grouped.topk(2, -1)[0].sum(-1).topk(self.active_groups, -1)[1]  # [T, active groups]
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
        return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """E MLPs: gated(x gate_up^T + bias) down^T + bias, where gated is silu(gate) * up; a family may override it.

    stacked       matrices of a stack: E, and one more where a shared expert lies behind them (`engine.load`)
    gate          the name of `combine` in the kernels: "silu", or "clamped" with its `alpha` and `limit`; they have no
                  others
    interleaved   rows 2i of gate_up are of the gate and rows 2i + 1 of up; else the first half and the second
    grouped       what computes `forward` where kernels can
    parts         parameter -> the matrices of an expert in it, by rows
    """

    parts: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    grouped: GroupedExperts | None = None
    gate = "silu"
    interleaved = False
    alpha = limit = 0.0
    gate_up_proj: nn.Parameter | PackedStack
    down_proj: nn.Parameter | PackedStack

    def __init__(self, config: DecoderConfig, bias: bool = True) -> None:
        super().__init__()
        self.count = self.stacked = config.experts
        self.width = config.expert_width
        self.add_matrices(config, bias)

    def add_matrices(self, config: DecoderConfig, bias: bool) -> None:
        """Create the stacks."""
        hidden, rows = config.hidden, 2 * self.width
        self.gate_up_proj = nn.Parameter(torch.empty(self.count, rows, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.count, hidden, self.width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(self.count, rows)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(self.count, hidden)) if bias else None

    def combine(self, gate_up: Tensor) -> Tensor:
        """gate_up [rows, 2 * width], which may be written over -> [rows, width]."""
        gate, up = gate_up.chunk(2, -1)
        return ACTIVATIONS["silu"](gate) * up

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden], weights f32 and chosen [T, k] -> the weighted sum of the chosen experts [T, hidden].

        The terms of a token are added in f32: in the order of the experts' numbers, or of `chosen` where kernels do it.
        """
        if self.grouped is not None:
            return self.grouped(x, weights, chosen)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = chosen.flatten().argsort(stable=True)  # places in `chosen`, by expert
        tokens, scales = order // chosen.shape[1], weights.flatten()[order, None]
        first = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=self.count).tolist()):
            if not count:
                continue
            rows = tokens[first : first + count]
            y.index_add_(0, rows, self.one(x[rows], expert) * scales[first : first + count])
            first += count
        return y.to(x.dtype)

    def one(self, x: Tensor, expert: int) -> Tensor:
        """x [rows, hidden] -> the output of one expert [rows, hidden]."""
        gated = self.combine(_product(x, self.gate_up_proj, self.gate_up_proj_bias, expert))
        return _product(gated, self.down_proj, self.down_proj_bias, expert)


def _product(x: Tensor, stack: nn.Parameter | PackedStack, biases: Tensor | None, expert: int) -> Tensor:
    bias = None if biases is None else biases[expert]
    if isinstance(stack, nn.Parameter):
        return product(x, stack[expert], bias)
    return stack.product(x, expert, bias)


class UngatedExperts(Experts):
    """E MLPs without gates: relu(x up^T)^2 down^T, which kernels for experts do not compute."""

    parts: Mapping[str, tuple[str, ...]] = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
    gate = "relu2"
    up_proj: nn.Parameter | PackedStack

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, bias=False)

    def add_matrices(self, config: DecoderConfig, bias: bool) -> None:
        """Create the stacks."""
        self.up_proj = nn.Parameter(torch.empty(self.count, self.width, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(self.count, config.hidden, self.width))

    def one(self, x: Tensor, expert: int) -> Tensor:
        """x [rows, hidden] -> the output of one expert [rows, hidden]."""
        return _product(squared_relu(_product(x, self.up_proj, None, expert)), self.down_proj, None, expert)


class Mixture(nn.Module):
    """The MLP of a layer with experts."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out: Tensor = self.experts(x, *self.router.route(x))
        return out


class SummedMixture(Mixture):
    """A mixture beside an MLP that every token goes through; what both give is added."""

    def __init__(self, router: Router, experts: Experts, shared: nn.Module) -> None:
        super().__init__(router, experts)
        self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out: Tensor = super().forward(x).add_(self.shared_experts(x))
        return out


class StackedExpert(nn.Module):
    """The expert behind the others in their stacks. It has no weights of its own."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self._stacks = (experts,)  # a module in a tuple is not registered twice

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        (experts,) = self._stacks
        return experts.one(x, experts.count)


class SharedExpertMixture(Mixture):
    """A mixture beside one expert that every token goes through, times the sigmoid of a gate."""

    shared_expert: GatedMLP | StackedExpert

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP, hidden: int) -> None:
        super().__init__(router, experts)
        self.shared_expert = shared
        self.shared_expert_gate = PlainLinear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out: Tensor = super().forward(x) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out
