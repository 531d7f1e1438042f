"""Ministral 3: a llama with YaRN from 16k to 256k tokens, whose queries grow with their position (as in Llama 4).

After transformers' models/ministral3/modeling_ministral3.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import llama
from localq.models.config import QUERY_GROWTH, DecoderConfig, integer, number, section, unsupported_error
from localq.models.decoder import Decoder

Model = Decoder
rename = llama.rename
DEFAULTS: dict[str, Any] = {  # files of this family leave out what equals the class defaults of transformers
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
YARN = {  # where the file says nothing
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, QUERY_GROWTH: 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a ministral3."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`, flat."""
        if config.get("layer_types"):  # the reference passes over it, so what its author meant is not known
            raise unsupported_error("layer_types", config["layer_types"])
        config = {**DEFAULTS, **config}
        stated = section(config, "rope_scaling") or section(config, "rope_parameters") or YARN
        turned = {key: value for key, value in stated.items() if key != QUERY_GROWTH}
        base = cls.read({**config, "rope_scaling": None, "rope_parameters": turned})
        if stated.get(QUERY_GROWTH):
            growth, period = number(stated, QUERY_GROWTH), integer(stated, "original_max_position_embeddings")
            base = replace(base, query_growth=growth, query_period=period)
        window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
        return replace(base, windows=(window,) * base.layers)
