"""Granite 3 and 4.1, dense: a llama with four constants, for the embedding, the residual, attention and the logits.

After transformers' models/granite/modeling_granite.py. There a constant r multiplies what attention and MLPs add to the
stream. Here the stream is divided by r instead, which norms do not notice but for their eps, divided by r * r: the
embedding is multiplied by its constant over r, and all else is a llama's. The last norm divides the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from localq.models import llama
from localq.models.config import DecoderConfig, flag, number
from localq.models.decoder import Decoder
from localq.models.layers import ScaledRMSNorm

rename = llama.rename


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a granite; its eps is that of the divided stream.

    embedding_factor   multiplies rows of the embedding
    logit_factor       multiplies the logits
    """

    embedding_factor: float = 1.0
    logit_factor: float = 1.0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        base, bias = cls.read(config), flag(config, "attention_bias")
        residual = number(config, "residual_multiplier", 1.0)
        return replace(
            base,
            eps=base.eps / residual**2,
            attention_scale=number(config, "attention_multiplier", 1.0),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=flag(config, "mlp_bias"),
            embedding_factor=number(config, "embedding_multiplier", 1.0) / residual,
            logit_factor=1.0 / number(config, "logits_scaling", 1.0),
        )


class Model(Decoder):
    """Scales the embedding; the last norm holds the factor of the logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Config)
        self.norm = ScaledRMSNorm(config.hidden, config.eps, config.logit_factor)

    def make_tables(self, context: int, device: torch.device | str) -> None:
        """As `Decoder.make_tables`, and the scale of the embedding."""
        super().make_tables(context, device)
        assert isinstance(self.config, Config)
        self.embed_scale = self.config.embedding_factor
