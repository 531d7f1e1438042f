"""Mixtral: a mistral whose MLPs are mixtures of experts.

After transformers' models/mixtral/modeling_mixtral.py. Its softmax over all experts, divided by the sum of what was
chosen, is the softmax over the chosen ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from localq.models import qwen3_moe
from localq.models.config import integer
from localq.models.mixtures import MixtureConfig, MixtureDecoder

Model = MixtureDecoder
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
}
EXPERTS, THETA = 8, 1e6
_PART = re.compile(r"(?<=\.)w[123](?=\.)")
_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # as the files call them, and as the model does


@dataclass(frozen=True)
class Config(MixtureConfig):
    """Facts of a mixtral."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**DEFAULTS, **config}
        if config.get("num_local_experts") is None and config.get("num_experts") is None:
            config["num_local_experts"] = EXPERTS
        base = cls.read_mixture(config, "intermediate_size", THETA)
        window = 0 if config.get("sliding_window") is None else integer(config, "sliding_window")
        return replace(base, windows=(window,) * base.layers)


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; of an expert's matrix as in `qwen3_moe.rename`."""
    if ".block_sparse_moe." in key:
        key = _PART.sub(lambda match: _NAMES[match[0]], key.replace(".block_sparse_moe.", ".mlp."))
    return qwen3_moe.rename(key)
