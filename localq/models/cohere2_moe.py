"""Cohere2 with experts (Command A+): attention and the MLP read one norm, and both are added to the stream.

After transformers' models/cohere2_moe/modeling_cohere2_moe.py. Norms subtract the mean, unless the file states an eps
of RMS norms. The pairs that turn are neighbours, in layers with a window, and in dense ones where it says so; others
have no rotary embedding. Shared experts are one MLP, averaged with the chosen ones or added. The last norm holds the
factor of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.files import format_facts, parallel_blocks
from localq.files.model_types import MODEL_TYPES
from localq.models import qwen3_moe
from localq.models.attention import Attention, Pass
from localq.models.config import (
    DecoderConfig,
    flag,
    integer,
    malformed_error,
    number,
    read_windows,
    unsupported_error,
)
from localq.models.decoder import Block, Decoder, Norms
from localq.models.experts import Experts, Mixture, Router, SigmoidRouter, SummedMixture
from localq.models.layers import GatedMLP, RMSNorm, ScaledRMSNorm

TRAITS = MODEL_TYPES["cohere2_moe"]
FIXED = {
    "hidden_act": ("silu",),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "shared_expert_combination_strategy": ("average", "sum"),
}
rename = qwen3_moe.rename


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a cohere2_moe; `intermediate` is the width of dense MLPs.

    sparse         the layers with experts
    shared_width   of the MLP of the shared experts; 0 = there are none
    averaged       what shared and chosen experts give is averaged; else it is added
    selection      what weighs the chosen experts: "softmax" or "sigmoid"
    normalized     such sigmoids are divided by their sum
    centered       norms subtract the mean
    logit_factor   multiplies the logits
    """

    sparse: frozenset[int] = frozenset()
    shared_width: int = 0
    averaged: bool = True
    selection: str = "softmax"
    normalized: bool = True
    centered: bool = True
    logit_factor: float = 0.0625

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        null = "sliding_window"  # the reference does not run without one
        stated = {key: value for key, value in config.items() if value is not None or key == null}
        config = parallel_blocks.complete({**TRAITS.defaults, **stated})
        for key, values in FIXED.items():
            if config.get(key) is not None and config[key] not in values:
                raise unsupported_error(key, config[key])
        if config.get("rope_scaling"):  # the reference passes over it
            raise unsupported_error("rope_scaling", config["rope_scaling"])
        base = cls.read({**config, "num_experts": None}, tied=True)
        if any(rope and rope.rotary_dim != base.head_dim for rope in base.ropes):  # it turns whole heads only
            raise unsupported_error("partial_rotary_factor", base.rope_kinds[0].rotary_dim / base.head_dim)
        bias, (dense_width, shared_width) = flag(config, "attention_bias"), parallel_blocks.mlp_widths(config)
        turning, sparse = parallel_blocks.turning_layers(config), parallel_blocks.sparse_of(config)
        centered = config.get("rms_norm_eps") is None
        base = replace(
            base,
            intermediate=dense_width,
            eps=number(config, "layer_norm_eps" if centered else "rms_norm_eps"),
            centered=centered,
            qkv_bias=bias,
            output_bias=bias,
            windows=read_windows(config, base.layers, integer(config, "sliding_window"), []),
            ropes=tuple(rope if turns else None for rope, turns in zip(base.ropes, turning, strict=True)),
            sparse=frozenset(sparse),
            logit_factor=number(config, "logit_scale"),
        )
        return replace(base, **_experts(config), shared_width=shared_width) if sparse else base


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of mixtures, without the width of the shared experts."""
    experts, active = integer(config, "num_experts"), integer(config, "num_experts_per_tok")
    if active > experts:
        why = f"{active} experts per token are requested, but the model has only {experts}"
        raise malformed_error("num_experts_per_tok", why)
    return {
        "experts": experts,
        "experts_active": active,
        "expert_width": integer(config, "intermediate_size"),
        "averaged": config.get("shared_expert_combination_strategy") != "sum",
        "selection": config.get("expert_selection_fn") or "softmax",
        "normalized": flag(config, "norm_topk_prob", True),
    }


class CenteredNorm(RMSNorm):
    """weight * (x - mean(x)) / std(x), rounded last."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class ScaledCenteredNorm(ScaledRMSNorm):
    """constant * weight * (x - mean(x)) / std(x), all in f32 and rounded last."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return F.layer_norm(x.float(), self.scale.shape, self.scale, None, self.eps).to(x.dtype)


class NeighbourAttention(Attention):
    """Attention whose pairs that turn are the columns 2i and 2i + 1 of a head.

    Columns of queries and keys are cached in the order of other families, which changes no score.
    """

    def joined(self, q: Tensor, k: Tensor) -> Tensor:
        """As `Attention.joined`, in every head the even columns before the odd ones."""
        return torch.cat([each.view(*each.shape[:2], -1, 2).transpose(-1, -2) for each in (q, k)], 1).flatten(-2)


class LogitRouter(SigmoidRouter):
    """A router whose choice is by logits: sigmoids of large ones are all 1."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits f32 [T, E] -> as `route`."""
        largest, chosen = logits.topk(self.active, -1)
        weights = torch.sigmoid(largest)
        return weights if self.epsilon is None else weights / weights.sum(-1, keepdim=True), chosen


class SharedMixture(SummedMixture):
    """A mixture behind an MLP that every token goes through: the sum of what both give, times a factor.

    The MLP, which is wide, is first: behind experts it would not find memory in one piece.
    """

    def __init__(self, router: Router, experts: Experts, shared: GatedMLP, factor: float) -> None:
        super().__init__(router, experts, shared)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        shared = self.shared_experts(x)
        out: Tensor = self.experts(x, *self.router.route(x)).add_(shared)
        return out if self.factor == 1.0 else out.mul_(self.factor)


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        nn.Module.__init__(self)
        assert isinstance(config, Config)
        self.self_attn = NeighbourAttention(config, layer, self.norm_class)
        self.add_mlp(config, layer)
        self.input_layernorm = (CenteredNorm if config.centered else RMSNorm)(config.hidden, config.eps)

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add experts, with shared ones or alone, or an MLP in a dense layer."""
        assert isinstance(config, Config)
        if layer not in config.sparse:
            super().add_mlp(config, layer)
            return
        router, experts = Router(config, bias=False), Experts(config, bias=False)
        if config.selection == "sigmoid":
            router = LogitRouter(config, selection_bias=False, epsilon=0.0 if config.normalized else None)
        mixture = Mixture(router, experts)
        if config.shared_width:
            shared = GatedMLP(config.hidden, config.shared_width, config.activation, bias=False)
            mixture = SharedMixture(router, experts, shared, 0.5 if config.averaged else 1.0)
        self.mlp = mixture  # type: ignore[assignment]  # what works on the matrices of an MLP asks first what it is

    def norms(self) -> Norms:
        """The one norm, before both parts."""
        return Norms(self.input_layernorm, None, self.input_layernorm, None)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, step)
        out: Tensor = x + self.mlp(normed)
        return out


class Model(Decoder):
    """A decoder of such blocks."""

    block_class = ParallelBlock
    no_calibration = format_facts.NO_CALIBRATION
    no_kernel = f"no kernel supports {TRAITS.no_kernel}"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Config)
        last = ScaledCenteredNorm if config.centered else ScaledRMSNorm
        self.norm = last(config.hidden, config.eps, config.logit_factor)
