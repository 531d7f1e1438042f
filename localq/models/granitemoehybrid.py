"""Granite 4.0: layers mix tokens by a Mamba-2 or by attention, and multipliers scale what goes into the stream.

After transformers' models/granitemoehybrid/modeling_granitemoehybrid.py. Attention has a scale of its own, and a rotary
embedding only where config.json says so. Every token goes through a shared MLP; in mixtures, what that gives is added
to the sum of the experts. Rows of the embedding, and what a layer adds, are multiplied by constants, and logits are
divided by one, which the last norm holds. Gate and up of the shared MLP are one matrix, but two in GGUF.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from localq.files import format_facts
from localq.files.layer_caches import KeysAndValues, LayerCache
from localq.files.mamba_layers import is_turning, mamba_columns, mamba_layers
from localq.files.model_types import MODEL_TYPES
from localq.models import llama
from localq.models.attention import Attention, Pass
from localq.models.config import DecoderConfig, flag, integer, malformed_error, number, unsupported_error
from localq.models.decoder import Block, Decoder
from localq.models.experts import Experts, Mixture, Router
from localq.models.layers import GatedMLP, ScaledRMSNorm
from localq.models.mamba2 import IN_F32, Mamba2, MambaShape
from localq.models.phi3 import FusedMLP

TRAITS = MODEL_TYPES["granitemoehybrid"]
FIXED = {"hidden_act": ("silu",), "mamba_conv_bias": (True,), "mamba_proj_bias": (False,)}  # as published models have
SPLIT = "shared_mlp_split"  # our own key of config.json, of .gguf files
NAMES = {  # as the files call them, and as the model does
    ".shared_mlp.input_linear.": ".shared_mlp.gate_up_proj.",
    ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".mlp.router.",
    ".block_sparse_moe.": ".mlp.",
}


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a granitemoehybrid; `intermediate` is the width of the shared MLP.

    mamba           the shape of its Mamba-2 layers; None without any
    recurrent       the layers that have one
    stream_factor   multiplies what a part of a layer adds
    embed_factor, logit_factor   multiply rows of the embedding, and logits
    split           gate and up of the shared MLP are two matrices
    """

    mamba: MambaShape | None = None
    recurrent: frozenset[int] = frozenset()
    stream_factor: float = 1.0
    embed_factor: float = 1.0
    logit_factor: float = 1.0
    split: bool = False

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**TRAITS.defaults, **{key: value for key, value in config.items() if value is not None}}
        for key, values in FIXED.items():
            if config.get(key) is not None and config[key] not in values:
                raise unsupported_error(key, config[key])
        experts, width = config["num_local_experts"], integer(config, "shared_intermediate_size")
        base = cls.read({**config, "num_local_experts": None, "intermediate_size": width, "layer_types": None})
        bias = flag(config, "attention_bias")
        recurrent = mamba_layers(config, base.layers)
        base = replace(
            base,
            attention_scale=number(config, "attention_multiplier", 1.0),
            qkv_bias=bias,
            output_bias=bias,
            ropes=base.ropes if is_turning(config) else (None,) * base.layers,
            recurrent=frozenset(layer for layer, each in enumerate(recurrent) if each),
            mamba=_mamba(config) if any(recurrent) else None,
            stream_factor=number(config, "residual_multiplier", 1.0),
            embed_factor=number(config, "embedding_multiplier", 1.0),
            logit_factor=1 / number(config, "logits_scaling", 1.0),
            split=flag(config, SPLIT),
        )
        return base if experts == 0 and type(experts) is int else replace(base, **_experts(config))


def _mamba(config: dict[str, Any]) -> MambaShape:
    groups, heads = integer(config, "mamba_n_groups"), integer(config, "mamba_n_heads")
    columns = integer({"mamba_d_head": mamba_columns(config)}, "mamba_d_head")
    if heads * columns != integer(config, "mamba_expand") * integer(config, "hidden_size"):
        why = f"{columns} times {heads} heads does not equal mamba_expand times hidden_size"
        raise malformed_error("mamba_d_head", why)
    state, kernel = integer(config, "mamba_d_state"), integer(config, "mamba_d_conv")
    return MambaShape(heads, columns, groups, state, kernel, norm_groups=groups)


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of mixtures."""
    experts, active = integer(config, "num_local_experts"), integer(config, "num_experts_per_tok")
    if active > experts:
        why = f"{active} experts per token are requested, but the model has only {experts}"
        raise malformed_error("num_experts_per_tok", why)
    width = integer(config, "intermediate_size")
    return {"experts": experts, "experts_active": active, "expert_width": width}


class ScaledBlock(Block):
    """x + factor * mixer(norm(x)), then x + factor * (shared(norm(x)) + experts(norm(x)))."""

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """Create what mixes the tokens in this `layer`."""
        assert isinstance(config, Config)
        self.factor = config.stream_factor
        self.is_recurrent = layer in config.recurrent
        if self.is_recurrent:
            assert config.mamba is not None
            self.mamba = Mamba2(config.mamba, config.hidden, layer, config.eps)
        else:
            self.self_attn = Attention(config, layer, self.norm_class)

    def mixer(self) -> nn.Module:
        """Return what mixes the tokens."""
        return self.mamba if self.is_recurrent else self.self_attn

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add the shared MLP, and in mixtures the experts."""
        assert isinstance(config, Config)
        shared = GatedMLP if config.split else FusedMLP
        self.shared_mlp = shared(config.hidden, config.intermediate, config.activation, bias=False)
        self.has_experts = config.experts > 0
        if self.has_experts:
            self.mlp = Mixture(Router(config, bias=False), Experts(config, bias=False))  # type: ignore[assignment]

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.mixer()(self.input_layernorm(x), step).mul_(self.factor)
        normed = self.post_attention_layernorm(x)
        added: Tensor = self.shared_mlp(normed)
        if self.has_experts:
            added += self.mlp(normed)
        return x + added.mul_(self.factor)


class Model(Decoder):
    """A decoder of such blocks; the last norm holds the factor of the logits."""

    block_class = ScaledBlock
    no_calibration = format_facts.NO_CALIBRATION
    no_kernel = f"no kernel supports {TRAITS.no_kernel}"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Config)
        self.embed_scale = config.embed_factor
        self.norm = ScaledRMSNorm(config.hidden, config.eps, config.logit_factor)
        self.in_f32 = frozenset(name for name, _ in self.named_parameters() if name.endswith(IN_F32))

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """The cache of each layer."""
        config = self.config
        assert isinstance(config, Config)
        grows = KeysAndValues(config.kv_heads, config.head_dim)
        layers = range(config.layers)
        return tuple(config.mamba.cache if config.mamba and each in config.recurrent else grows for each in layers)


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; of an expert's matrix as in `qwen3_moe.rename`."""
    name = llama.rename(key)
    old = next((old for old in NAMES if name and old in name), "")
    return name.replace(old, NAMES[old]) if name and old else name
