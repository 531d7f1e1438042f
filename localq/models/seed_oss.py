"""Seed-OSS: a llama with biases on queries, keys and values, and heads that are together wider than the stream.

After transformers' models/seed_oss/modeling_seed_oss.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.files.model_types import MODEL_TYPES
from localq.models import llama
from localq.models.config import DecoderConfig, flag
from localq.models.decoder import Decoder

Model = Decoder
rename = llama.rename


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a seed_oss."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        null = "num_key_value_heads"  # means as many as heads, not the default
        stated = {key: value for key, value in config.items() if value is not None or key == null}
        config = {**MODEL_TYPES["seed_oss"].defaults, **stated}
        return replace(
            cls.read(config),
            qkv_bias=flag(config, "attention_bias"),
            output_bias=flag(config, "attention_out_bias"),
            mlp_bias=flag(config, "mlp_bias"),
        )
