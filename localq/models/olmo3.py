"""OLMo 3 and 3.1: norms behind attention and the MLP only, and norms of queries and keys over all heads together.

After transformers' models/olmo3/modeling_olmo3.py. Three windowed layers to one without a window; a scaling of the
rotary embedding counts in layers without a window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from localq.files.model_types import MODEL_TYPES
from localq.models import llama
from localq.models.attention import Attention, Pass, Projected
from localq.models.config import (
    WINDOWED,
    DecoderConfig,
    flag,
    integer,
    read_rope,
    read_windows,
    rope_parameters,
    section,
)
from localq.models.decoder import Block, Decoder, Norms
from localq.models.layers import RMSNorm, WideRMSNorm

rename = llama.rename
THETA = 500_000.0


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of an olmo3."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**MODEL_TYPES["olmo3"].defaults, "rms_norm_eps": 1e-5, **config}
        whole, local = _rope_parts(config)
        base = cls.read({**config, "rope_scaling": None, "rope_parameters": whole})
        pattern = [(layer + 1) % 4 != 0 for layer in range(base.layers)]
        window = 0 if config["sliding_window"] is None else integer(config, "sliding_window")
        windows = read_windows(config, base.layers, window, pattern)
        near = read_rope(config, rope_parameters({"rope_parameters": local}, THETA), base.head_dim)
        bias = flag(config, "attention_bias")
        return replace(
            base,
            ropes=tuple(near if each else rope for each, rope in zip(windows, base.ropes, strict=True)),
            windows=windows,
            qkv_bias=bias,
            output_bias=bias,
        )


def _rope_parts(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary parameters of layers without and with a window; those of flat files are the first, but for theta."""
    stated = section(config, "rope_parameters")
    nested = any(kind in stated for kind in WINDOWED)
    flat = {} if nested else stated
    theta = {"rope_theta": flat.get("rope_theta") or config.get("rope_theta") or THETA}
    scaled = {**flat, **section(config, "rope_scaling")}
    return (
        {**theta, **section(stated, "full_attention"), **scaled},
        {**theta, **section(stated, "sliding_attention")},
    )


class WideNormAttention(Attention):
    """Attention whose norms of queries and keys are over all heads together."""

    def __init__(self, config: DecoderConfig, layer: int, norm: type[RMSNorm]) -> None:
        super().__init__(config, layer, norm)
        self.q_norm = norm(self.heads * self.head_dim, config.eps)
        self.k_norm = norm(self.kv_heads * self.head_dim, config.eps)

    def wide_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """Return the norms of q and of k."""
        return self.q_norm, self.k_norm

    def project(self, x: Tensor) -> Projected:
        """x [T, hidden] -> q, k and v."""
        return Projected(self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))


class PostNormBlock(Block):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        del self.input_layernorm
        self.post_feedforward_layernorm = self.norm_class(config.hidden, config.eps)

    def norms(self) -> Norms:
        """One behind attention, and one behind the MLP."""
        return Norms(None, self.post_attention_layernorm, None, self.post_feedforward_layernorm)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.post_attention_layernorm(self.self_attn(x, step))
        out: Tensor = x + self.post_feedforward_layernorm(self.mlp(x))
        return self.block_output(out, step.layer_inputs)


class WideNormBlock(PostNormBlock):
    """A block with such attention."""

    attention_class = WideNormAttention
    norm_class = WideRMSNorm


class Model(Decoder):
    """A decoder of such blocks."""

    block_class = WideNormBlock
