"""Qwen3.5, 3.6 and 3.8: three layers with gated delta nets to one of gated attention.

After transformers' models/qwen3_5/modeling_qwen3_5.py. Heads of attention turn in their first quarter only, and the
sigmoid of a gate, in `q_proj` behind the rows of q of every head, multiplies what they gather. Norms multiply by
1 + weight, but that of the delta nets by weight. `qwen3_5` is the multimodal wrapper around `qwen3_5_text`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor, nn

from localq.files.extra_tensors import is_beside_text
from localq.files.layer_caches import KeysAndValues, LayerCache
from localq.files.model_types import MODEL_TYPES, text_part
from localq.models import qwen3_moe
from localq.models.attention import Attention, Pass, Projected
from localq.models.config import (
    DecoderConfig,
    flag,
    integer,
    malformed_error,
    section,
    unsupported_error,
)
from localq.models.decoder import Decoder
from localq.models.gated_delta_net import DeltaShape, GatedDeltaNet
from localq.models.layers import Linear, OffsetRMSNorm
from localq.models.mixtures import MixtureBlock, MixtureConfig
from localq.models.rope import rotate

NO_DELTA = DeltaShape(0, 0, 0, 0, 0)
RECURRENT = {"linear_attention": True, "full_attention": False}  # the supported layer types
ROPE_KEYS = ("rope_parameters", "rope_scaling")
_PREFIX = re.compile(r"^(?:(?:model|language_model)\.)+")  # wrappers have either, both, and in either order
FIXED = {"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")}  # as all published models have them


@dataclass(frozen=True)
class Config(MixtureConfig):
    """Facts of a qwen3_5.

    delta       the shape of its gated delta nets
    recurrent   the layers that have one
    """

    delta: DeltaShape = NO_DELTA
    recurrent: frozenset[int] = frozenset()

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`, plain (`qwen3_5_text`) or with `text_config` inside (`qwen3_5`)."""
        return cls.read_hybrid(complete(config))

    @classmethod
    def read_hybrid(cls, config: dict[str, Any]) -> Self:
        """The facts but those of a mixture, from the `complete` text part of `config.json`."""
        for key, values in FIXED.items():
            if config.get(key) is not None and config[key] not in values:
                raise unsupported_error(key, config[key])
        config = {**config, **{key: one_axis(section(config, key)) for key in ROPE_KEYS}}
        base, bias = cls.read(config, theta=10_000.0), flag(config, "attention_bias")
        if base.activation != "silu":  # the one of the convolutions, too
            raise unsupported_error("hidden_act", base.activation)
        return replace(
            base,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            delta=_delta(config),
            recurrent=_recurrent_layers(config, base.layers),
        )


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of `config`, with the values of keys that files leave out."""
    model_type, text = text_part(config)
    stated = {key: value for key, value in text.items() if value is not None}
    return {**MODEL_TYPES[model_type].defaults, **stated}


def one_axis(parameters: dict[str, Any]) -> dict[str, Any]:
    """Drop how pairs are divided among three axes of positions: those of a text are equal."""
    sections = parameters.get("mrope_section")
    if sections is not None and not (
        isinstance(sections, list) and len(sections) == 3 and all(type(each) is int and each >= 0 for each in sections)
    ):
        raise malformed_error("mrope_section", f"{sections!r} is not a list of three non-negative integers")
    return {key: value for key, value in parameters.items() if key not in ("mrope_section", "mrope_interleaved")}


def _delta(config: dict[str, Any]) -> DeltaShape:
    shape = DeltaShape(
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        kernel=integer(config, "linear_conv_kernel_dim"),
    )
    if shape.value_heads % shape.key_heads:
        why = f"{shape.value_heads} is not a multiple of linear_num_key_heads, {shape.key_heads}"
        raise malformed_error("linear_num_value_heads", why)
    return shape


def _recurrent_layers(config: dict[str, Any], layers: int) -> frozenset[int]:
    """The layers with a gated delta net: by `layer_types`, else all but every `full_attention_interval`-th."""
    types = config.get("layer_types")
    if types is None:
        interval = integer(config, "full_attention_interval")
        return frozenset(layer for layer in range(layers) if (layer + 1) % interval)
    if not isinstance(types, list) or len(types) != layers:
        raise malformed_error("layer_types", f"not a list of {layers} names")
    for name in types:
        if not isinstance(name, str) or name not in RECURRENT:
            raise unsupported_error("layer_types", name)
    return frozenset(layer for layer, name in enumerate(types) if RECURRENT[name])


class GatedAttention(Attention):
    """Attention whose `q_proj` has, for every head, the rows of q and then those of its gate."""

    gate_in_q = is_gated = True

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the linears of this layer."""
        super().add_projections(config)
        self.q_proj = Linear(config.hidden, 2 * config.heads * config.head_dim, bias=config.qkv_bias)

    def project(self, x: Tensor) -> Projected:
        """x [T, hidden] -> q, k, v and the gate."""
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        return Projected(q, self.k_proj(x), self.v_proj(x), gate)

    def remember(self, x: Tensor, step: Pass) -> None:
        """x [T, hidden]: store the keys and values that `forward` stores, and do no more."""
        k, v = (part.unflatten(-1, (self.kv_heads, self.head_dim)) for part in (self.k_proj(x), self.v_proj(x)))
        if self.qk_norm:
            k = self.k_norm(k)
        if self.rope_kind is not None:
            k = rotate(k, *step.rotary[self.rope_kind])
        step.cache.update(self.layer, k, v, step.positions, step.live)


class HybridBlock(MixtureBlock):
    """A block with a gated delta net or with attention."""

    attention_class = GatedAttention
    norm_class = OffsetRMSNorm

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """Create what mixes the tokens in this `layer`."""
        assert isinstance(config, Config)
        self.is_recurrent = layer in config.recurrent
        if self.is_recurrent:
            self.linear_attn = GatedDeltaNet(config.delta, config.hidden, layer, config.eps)
        else:
            super().add_mixer(config, layer)

    def mixer(self) -> nn.Module:
        """Return what mixes the tokens."""
        return self.linear_attn if self.is_recurrent else self.self_attn


class Model(Decoder):
    """A decoder of such blocks."""

    block_class = HybridBlock

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        # An exponential of an exponential: rounded to 16 bit, it is off by percents in heads that forget fast.
        self.in_f32 = frozenset(name for name, _ in self.named_parameters() if name.endswith(".A_log"))

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """The cache of each layer."""
        config = self.config
        assert isinstance(config, Config)
        grows, state = KeysAndValues(config.kv_heads, config.head_dim), config.delta.cache
        return tuple(state if layer in config.recurrent else grows for layer in range(config.layers))


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; None = not ours (towers, and what `qwen3_5_mtp` reads).

    Of experts as in `qwen3_moe.rename`.
    """
    return None if is_beside_text(key) else qwen3_moe.rename(_PREFIX.sub("", key))
