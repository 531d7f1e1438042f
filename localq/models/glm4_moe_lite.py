"""GLM-4.7-Flash: latent attention, and experts beside shared ones in all layers but the first.

After transformers' models/glm4_moe_lite/modeling_glm4_moe_lite.py. Routers weigh by sigmoids, with a bias that counts
in the choice only. The norms of latents have an eps of their own, whatever the file states. Files hold a layer behind
the last, which predicts more tokens and is not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from localq.files import format_facts
from localq.files.context_length import longest_context
from localq.files.layer_caches import Latents, LayerCache
from localq.files.layer_patterns import routed_experts, sparse_layers
from localq.files.model_types import MODEL_TYPES
from localq.models import qwen3_moe
from localq.models.config import (
    LIMITS,
    DecoderConfig,
    flag,
    integer,
    malformed_error,
    number,
    read_rope,
    rope_parameters,
    unsupported_error,
)
from localq.models.decoder import Block, Decoder
from localq.models.experts import Experts, SigmoidRouter, SummedMixture
from localq.models.latent_attention import LatentAttention, LatentConfig, LatentShape
from localq.models.layers import GatedMLP

TRAITS = MODEL_TYPES["glm4_moe_lite"]
FIXED = {  # as all published models have them; the reference does not look at the last three
    "hidden_act": ("silu",), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,),
}  # fmt: skip
NULL = ("q_lora_rank", "num_key_value_heads")  # null is not their default
LATENT_EPS = 1e-6  # of the norms of latents
EPSILON = 1e-20  # beside the sum of the weights
OLD_BIAS, OUR_BIAS = ".mlp.router.e_score_correction_bias", ".mlp.router.selection_bias"
IN_F32 = (".router.weight", ".router.selection_bias")


@dataclass(frozen=True)
class Config(LatentConfig):
    """Facts of a glm4_moe_lite.

    sparse          the layers with experts
    shared_width    of the MLP of all shared experts together
    normalized, expert_factor, expert_groups, active_groups   as of `SigmoidRouter`
    """

    sparse: frozenset[int] = frozenset()
    shared_width: int = 0
    normalized: bool = True
    expert_factor: float = 1.0
    expert_groups: int = 1
    active_groups: int = 1

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        stated = {key: value for key, value in config.items() if value is not None or key in NULL}
        config = {**TRAITS.defaults, **stated}
        heads, rotary = integer(config, "num_attention_heads"), integer(config, "qk_rope_head_dim")
        turns = _refuse(config, heads, rotary)
        head_dim = integer(config, "qk_nope_head_dim") + rotary
        own = {"head_dim": rotary, "num_key_value_heads": heads, "rope_parameters": None, "rope_scaling": None}
        base = cls.read({**config, **own, "n_routed_experts": None, "num_local_experts": None})
        bias, sparse = flag(config, "attention_bias"), sparse_layers(config, base.layers)
        first = config.get("first_k_dense_replace")
        if first is not None and sparse != tuple(layer >= first for layer in range(base.layers)):
            raise unsupported_error("first_k_dense_replace", first)  # the reference passes over it
        base = replace(
            base,
            head_dim=head_dim,
            max_context=longest_context(config),
            attention_scale=head_dim**-0.5 * _temperature(turns) ** 2,
            ropes=(read_rope(config, turns, rotary),) * base.layers,
            qkv_bias=bias,
            output_bias=bias,
            latents=LatentShape(
                latent=integer(config, "kv_lora_rank"),
                query_latent=0 if config["q_lora_rank"] is None else integer(config, "q_lora_rank"),
                rotary=rotary,
                value_dim=integer(config, "v_head_dim"),
                eps=LATENT_EPS,
                neighbours=flag(config, "rope_interleave", True),
            ),
            sparse=frozenset(layer for layer, each in enumerate(sparse) if each),
        )
        return replace(base, **_experts(config)) if base.sparse else base


def _refuse(config: dict[str, Any], heads: int, rotary: int) -> dict[str, Any]:
    """Reject what the reference does not compute; returns the rotary parameters in the newer spelling."""
    for key, values in FIXED.items():
        if config.get(key) is not None and config[key] not in values:
            raise unsupported_error(key, config[key])
    if config.get("num_key_value_heads") not in (None, heads):
        raise unsupported_error("num_key_value_heads", config["num_key_value_heads"])
    if config.get("head_dim") not in (None, rotary):  # there, another name of `qk_rope_head_dim`
        raise unsupported_error("head_dim", config["head_dim"])
    if rotary % 2:
        raise malformed_error("qk_rope_head_dim", f"{rotary} is odd, but rotary dimensions come in pairs")
    turns = rope_parameters(config, 10_000.0)
    if turns.get("partial_rotary_factor") not in (None, 1.0):  # all of these columns turn
        raise unsupported_error("partial_rotary_factor", turns["partial_rotary_factor"])
    return turns


def _temperature(turns: dict[str, Any]) -> float:
    """Return the factor of queries and keys in scaled rotary embeddings: 0.1 m ln(factor) + 1, m = `mscale_all_dim`."""
    if turns["rope_type"] == "default" or not turns.get("mscale_all_dim"):
        return 1.0
    factor, scale = number(turns, "factor"), number(turns, "mscale_all_dim")
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of mixtures."""
    experts = integer({"n_routed_experts": routed_experts(config)}, "n_routed_experts")
    active, width = integer(config, "num_experts_per_tok"), integer(config, "moe_intermediate_size")
    if active > experts:
        why = f"{active} experts per token are requested, but the model has only {experts}"
        raise malformed_error("num_experts_per_tok", why)
    groups, active_groups = integer(config, "n_group", 1), integer(config, "topk_group", 1)
    if experts % groups or active_groups > groups or active > experts // groups * active_groups:
        why = f"{active} of {experts} experts cannot come from {active_groups} of {groups} groups"
        raise malformed_error("n_group", why)
    if experts // groups < 2:
        raise malformed_error("n_group", f"{experts} experts in {groups} groups leave fewer than two per group")
    shared = width * integer(config, "n_shared_experts")
    if shared > LIMITS["moe_intermediate_size"]:
        most = LIMITS["moe_intermediate_size"]
        raise malformed_error("n_shared_experts", f"the shared experts have {shared} columns, more than {most}")
    return {
        "experts": experts,
        "experts_active": active,
        "expert_width": width,
        "shared_width": shared,
        "normalized": flag(config, "norm_topk_prob", True),
        "expert_factor": number(config, "routed_scaling_factor"),
        "expert_groups": groups,
        "active_groups": active_groups,
    }


class LatentBlock(Block):
    """A block whose MLP is a mixture beside shared experts, unless its layer is dense."""

    attention_class = LatentAttention

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add the mixture, or an MLP."""
        assert isinstance(config, Config)
        if layer not in config.sparse:
            super().add_mlp(config, layer)
            return
        router = SigmoidRouter(
            config,
            selection_bias=True,
            epsilon=EPSILON if config.normalized else None,
            factor=config.expert_factor,
            groups=config.expert_groups,
            active_groups=config.active_groups,
        )
        shared = GatedMLP(config.hidden, config.shared_width, config.activation, bias=False)
        # What works on the matrices of an MLP asks first what it is.
        self.mlp = SummedMixture(router, Experts(config, bias=False), shared)  # type: ignore[assignment]


class Model(Decoder):
    """A decoder of such blocks."""

    block_class = LatentBlock
    no_calibration = format_facts.NO_CALIBRATION
    no_kernel = f"no kernel supports {TRAITS.no_kernel}"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.in_f32 = frozenset(name for name, _ in self.named_parameters() if name.endswith(IN_F32))

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """Latents in every layer."""
        assert isinstance(self.config, Config)
        assert self.config.latents is not None
        return (Latents(self.config.latents.cached),) * self.config.layers


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; of an expert's matrix as in `qwen3_moe.rename`."""
    name = qwen3_moe.rename(key)
    return name and name.replace(OLD_BIAS, OUR_BIAS)
