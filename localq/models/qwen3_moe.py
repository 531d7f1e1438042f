"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B): a qwen3 whose MLPs are mixtures, in all layers or in some.

After transformers' models/qwen3_moe/modeling_qwen3_moe.py. The softmax of a token's router is over all experts; with
`norm_topk_prob`, which the published models have and the class has not, over those that are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import llama
from localq.models.config import flag, integer, malformed_error
from localq.models.mixtures import MixtureConfig, MixtureDecoder

Model = MixtureDecoder
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}
EXPERTS, WINDOW = 128, 4096


@dataclass(frozen=True)
class Config(MixtureConfig):
    """Facts of a qwen3_moe."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**DEFAULTS, **config}
        if config.get("num_experts") is None and config.get("num_local_experts") is None:
            config["num_experts"] = EXPERTS
        base, bias = cls.read_mixture(config, "moe_intermediate_size", 10_000.0), flag(config, "attention_bias")
        stated = flag(config, "use_sliding_window") and config.get("sliding_window", WINDOW) is not None
        window = integer(config, "sliding_window", WINDOW) if stated else 0
        dense = _dense_layers(config, base.layers)
        if len(dense) == base.layers:
            base = replace(base, experts=0, experts_active=0, expert_width=0)
        return replace(
            base,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=(window,) * base.layers,  # the reference has them all alike
            dense=dense if base.experts else frozenset(),
            routing="softmax_of_chosen" if flag(config, "norm_topk_prob") else "softmax_of_all",
        )


def _dense_layers(config: dict[str, Any], layers: int) -> frozenset[int]:
    """Return the dense layers: those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in named):
        raise malformed_error("mlp_only_layers", f"not a list of layer indices from 0 to {layers - 1}")
    step = integer(config, "decoder_sparse_step", 1)
    return frozenset(named) | {layer for layer in range(layers) if (layer + 1) % step}


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; llama's, and the router by what it is.

    The matrix of one expert, as files hold it, is no parameter: "layers.0.mlp.experts.7.gate_proj.weight" and the
    like are what `engine.load.expert_pieces` joins.
    """
    name = llama.rename(key)
    return name and name.replace(".mlp.gate.", ".mlp.router.")
