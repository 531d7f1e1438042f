"""Gemma 2: a scaled embedding, norms with 1 + weight on both sides of attention and MLP, soft caps, every other
layer windowed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localq.models import llama
from localq.models.attention import Pass
from localq.models.config import DecoderConfig, flag, integer, number, read_activation, read_windows
from localq.models.decoder import Block, Decoder, Norms
from localq.models.layers import OffsetRMSNorm, RMSNorm

rename = llama.rename
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256}
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # where absent; null means none


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a gemma2."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**DEFAULTS, **SOFTCAPS, **config}
        base = cls.read(config, tied=True)
        even = [layer % 2 == 0 for layer in range(base.layers)]
        return replace(
            base,
            windows=read_windows(config, base.layers, integer(config, "sliding_window"), even),
            **gemma_facts(config),
        )


def gemma_facts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `DecoderConfig` that gemma 2 and 3 state in the same way."""
    bias = flag(config, "attention_bias")
    return {
        "activation": read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": number(config, "query_pre_attn_scalar") ** -0.5,
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_softcap": _optional(config, "attn_logit_softcapping"),
        "final_softcap": _optional(config, "final_logit_softcapping"),
    }


def _optional(config: dict[str, Any], key: str) -> float:
    return 0.0 if config.get(key) is None else number(config, key)


class SandwichBlock(Block):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    norm_class: type[RMSNorm] = OffsetRMSNorm

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm = self.norm_class(config.hidden, config.eps)
        self.post_feedforward_layernorm = self.norm_class(config.hidden, config.eps)

    def norms(self) -> Norms:
        """One on either side of attention and of the MLP."""
        return Norms(
            self.input_layernorm,
            self.post_attention_layernorm,
            self.pre_feedforward_layernorm,
            self.post_feedforward_layernorm,
        )

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step))
        out: Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return self.block_output(out, step.layer_inputs)


class Model(Decoder):
    """Scales the embedding by sqrt(hidden), rounded to the dtype of the weights."""

    block_class: type[Block] = SandwichBlock

    def make_tables(self, context: int, device: torch.device | str) -> None:
        """As `Decoder.make_tables`, and the rounded scale."""
        super().make_tables(context, device)
        self.embed_scale = torch.tensor(self.config.hidden**0.5).to(self.norm.weight.dtype).item()
