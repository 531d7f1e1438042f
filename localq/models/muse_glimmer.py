"""Muse Glimmer, the text part: three windowed layers to one that has neither a window nor a rotary embedding.

After transformers' models/muse_glimmer/modeling_muse_glimmer.py. Rows of the embedding, queries and keys are normed
without weights, queries then multiplied by a constant; the sigmoid of a gate multiplies what the heads of attention
gather; logits are multiplied by a constant before their soft cap. Norms around attention and MLP multiply by
1 + weight, the last one by weight. `muse_glimmer` is the multimodal wrapper around `muse_glimmer_text`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localq.files.model_types import MODEL_TYPES, text_part
from localq.models import gemma3
from localq.models.attention import Attention, Projected
from localq.models.config import (
    DecoderConfig,
    flag,
    integer,
    malformed_error,
    number,
    read_activation,
    read_windows,
    unsupported_error,
)
from localq.models.decoder import Block, Decoder
from localq.models.gemma2 import SandwichBlock
from localq.models.layers import ConstantRMSNorm, Linear, RMSNorm, ScaledRMSNorm

rename = gemma3.rename  # the wrappers name their parts alike
CYCLE = 4  # layers, counted from the last one, which has no window


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a muse_glimmer.

    query_factor   multiplies queries after their norm
    logit_factor   multiplies logits before their soft cap
    post_eps       of the norms behind attention and MLP
    """

    query_factor: float = 3.87
    logit_factor: float = 0.19611613513818404
    post_eps: float = 1e-8

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`, plain (`muse_glimmer_text`) or with `text_config` inside (`muse_glimmer`)."""
        model_type, text = text_part(config)
        config = {**MODEL_TYPES[model_type].defaults, "rms_norm_eps": 1e-5, **text}
        base, bias = cls.read(config), flag(config, "attention_bias")
        spread = [(base.layers - 1 - layer) % CYCLE == 0 for layer in range(base.layers)]
        window = integer(config, "sliding_window")
        return replace(
            base,
            activation=read_activation(config, "hidden_activation", "silu"),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            ropes=tuple(
                rope if turns else None for rope, turns in zip(base.ropes, _turning(config, spread), strict=True)
            ),
            windows=read_windows(config, base.layers, window, [not each for each in spread]),
            final_softcap=number(config, "final_logit_softcapping", 20.0),
            query_factor=number(config, "qk_scale_factor", cls.query_factor),
            logit_factor=number(config, "output_multiplier", cls.logit_factor),
            post_eps=number(config, "post_norm_eps", cls.post_eps),
        )


def _turning(config: dict[str, Any], spread: list[bool]) -> list[bool]:
    """Return which layers rotate: those with a nonzero theta in `layer_rope_theta`, by default those with a window.

    The reference rotates all of them by the theta of `rope_parameters`; another one is refused.
    """
    stated = config.get("layer_rope_theta")
    if stated is None:
        return [not each for each in spread]
    if not isinstance(stated, list) or len(stated) != len(spread):
        raise malformed_error("layer_rope_theta", f"not a list of {len(spread)} numbers")
    thetas = {number({"theta": each}, "theta", low=1.0) for each in stated if each != 0}
    if len(thetas) > 1:
        raise unsupported_error("layer_rope_theta", stated)
    return [each != 0 for each in stated]


class AttentionWithGate(Attention):
    """Attention with a gate, a linear of its own, and norms of queries and keys that have no weights."""

    is_gated = True

    def __init__(self, config: DecoderConfig, layer: int, norm: type[RMSNorm]) -> None:
        super().__init__(config, layer, norm)
        assert isinstance(config, Config)
        self.q_norm = ConstantRMSNorm(config.head_dim, config.eps, config.query_factor)
        self.k_norm = ConstantRMSNorm(config.head_dim, config.eps)

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the linears of this layer."""
        super().add_projections(config)
        self.gate_proj = Linear(config.hidden, config.heads * config.head_dim, bias=False)

    def inputs(self) -> tuple[Linear, ...]:
        """Return the linears that read x."""
        return self.gate_proj, self.q_proj, self.k_proj, self.v_proj

    def gate(self) -> Linear:
        """Return the gate's."""
        return self.gate_proj

    def project(self, x: Tensor) -> Projected:
        """x [T, hidden] -> q, k, v and the gate."""
        return Projected(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.gate_proj(x))


class GatedBlock(SandwichBlock):
    """Norms on both sides of attention and MLP, those behind with an eps of their own."""

    attention_class = AttentionWithGate

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config, Config)
        for norm in (self.post_attention_layernorm, self.post_feedforward_layernorm):
            norm.eps = config.post_eps


class Model(Decoder):
    """Norms the rows of the embedding; the last norm holds the factor of the logits."""

    block_class: type[Block] = GatedBlock

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Config)
        self.norm = ScaledRMSNorm(config.hidden, config.eps, config.logit_factor)
        self.embed_norm = ConstantRMSNorm(config.hidden, config.eps)

    def make_tables(self, context: int, device: torch.device | str) -> None:
        """As `Decoder.make_tables`, and the constants of norms without weights."""
        super().make_tables(context, device)
        for module in self.modules():
            if isinstance(module, ConstantRMSNorm):
                module.place(device)

    def embedding_norm(self) -> ConstantRMSNorm:
        """Return the norm of rows of the embedding."""
        return self.embed_norm

    def scale_embedding(self, rows: Tensor) -> Tensor:
        """Norm rows [..., hidden] of the embedding."""
        normed: Tensor = self.embed_norm(rows)
        return normed
