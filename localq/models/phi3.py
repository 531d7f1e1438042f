"""Phi-3, 3.5, 4 and 4-mini: a llama with fused projections, longrope, and heads of which only a part may turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from localq.models import llama
from localq.models.attention import Attention, Projected
from localq.models.config import DecoderConfig, integer
from localq.models.decoder import Block, Decoder
from localq.models.layers import GatedMLP, Linear

rename = llama.rename


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a phi3."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`; early files call longrope "su" or "yarn"."""
        config = {"original_max_position_embeddings": 4096, **config}
        for key in ("rope_scaling", "rope_parameters"):
            parameters = config.get(key)
            if isinstance(parameters, dict) and parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):
                config[key] = {**parameters, "rope_type": "longrope"}
        base = cls.read(config)
        window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
        return replace(base, windows=(window,) * base.layers)


class FusedAttention(Attention):
    """One projection for queries, keys and values, in this order."""

    def add_projections(self, config: DecoderConfig) -> None:
        """The linears of this layer."""
        self.widths = [config.heads * config.head_dim, *(config.kv_heads * config.head_dim,) * 2]
        self.qkv_proj = Linear(config.hidden, sum(self.widths), bias=config.qkv_bias)
        self.o_proj = Linear(self.widths[0], config.hidden, bias=config.output_bias)

    def inputs(self) -> tuple[nn.Module, ...]:
        """The linear that reads x."""
        return (self.qkv_proj,)

    def project(self, x: Tensor) -> Projected:
        """x [T, hidden] -> q, k and v."""
        return Projected(*self.qkv_proj(x).split(self.widths, -1))


class FusedMLP(GatedMLP):
    """One projection for gate and up, in this order."""

    def add_projections(self, hidden: int, intermediate: int, bias: bool) -> None:
        """The linears of this layer."""
        self.gate_up_proj = Linear(hidden, 2 * intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def inputs(self) -> tuple[nn.Module, ...]:
        """The linear that reads x."""
        return (self.gate_up_proj,)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        both = self.gate_up_proj(x)
        half = both.shape[-1] // 2
        gated = self.activation(both[..., :half]) * both[..., half:]
        del both  # its memory is free for what follows
        projected: Tensor = self.down_proj(gated)
        return projected


class FusedBlock(Block):
    """A block of fused parts."""

    attention_class = FusedAttention
    mlp_class = FusedMLP


class Model(Decoder):
    """A decoder of fused blocks."""

    block_class = FusedBlock
