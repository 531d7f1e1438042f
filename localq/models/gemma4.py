"""Gemma 4, the text part: layers without a window have wider heads of their own, and may make values from keys.

After transformers' models/gemma4/modeling_gemma4.py. Norms multiply by weight, those of values have none; scores are
not scaled; a number multiplies the output of every layer. Layers without a window turn by a proportional rotary
embedding, in which most pairs of a head stand still. In the small models (E2B, E4B) the last layers read the keys and
values of earlier ones, and every layer adds something of its own per token, gated by the stream: rows of a second table
and a projection of the embedding. `gemma4` and `gemma4_unified` are the multimodal wrappers around
`gemma4_text` and `gemma4_unified_text`; only tokens of images attend in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.files import format_facts
from localq.files.attention_shapes import global_heads, sources
from localq.files.layer_caches import LayerCache, SharedCache
from localq.files.model_types import MODEL_TYPES, text_part, windows
from localq.models import gemma3
from localq.models.attention import Attention, Pass, Projected
from localq.models.config import (
    DecoderConfig,
    flag,
    integer,
    malformed_error,
    number,
    read_activation,
    read_rope,
    read_windows,
    rope_parameters,
    section,
    unsupported_error,
)
from localq.models.decoder import table_rows
from localq.models.experts import Experts
from localq.models.gemma2 import Model as ScaledDecoder
from localq.models.gemma2 import SandwichBlock
from localq.models.layers import ACTIVATIONS, ConstantRMSNorm, Linear, PlainLinear, RMSNorm, WideRMSNorm
from localq.models.rope import rotate

rename = gemma3.rename  # the wrappers name their parts alike
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
INPUT_ROWS = 128  # tokens whose inputs of layers are computed at a time: they are wide
IMAGES = "vision"  # the tokens between which attention is not causal, as published models have it


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a gemma4.

    keys_as_values   layers without a window have no matrix of values: those are the keys before their norm
    shared           layer -> the earlier one whose keys and values it reads, in order
    wide_shared      the MLP of such layers is twice as wide
    input_width      of what every layer adds per token; 0 = nothing. Its table has input_vocab rows
    """

    keys_as_values: bool = False
    shared: tuple[tuple[int, int], ...] = ()
    wide_shared: bool = False
    input_width: int = 0
    input_vocab: int = 0

    def width_of(self, layer: int) -> int:
        """Return the width of the MLP of a layer."""
        return self.intermediate * (2 if self.wide_shared and layer in dict(self.shared) else 1)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`, plain (`gemma4_text`) or with `text_config` inside (`gemma4`)."""
        model_type, config = complete(config)
        if config.get("use_bidirectional_attention") not in (None, False, IMAGES):
            raise unsupported_error("use_bidirectional_attention", config["use_bidirectional_attention"])
        ropes = section(config, "rope_parameters") or ROPES
        base = cls.read(
            {**config, "rope_parameters": None, "use_bidirectional_attention": None, "num_experts": None}, tied=True
        )
        window, windowed = windows(model_type, config, base.layers)
        windowed = windowed or (False,) * base.layers
        whole = global_heads(config, windowed)
        if base.heads % whole[0]:
            raise malformed_error("num_global_key_value_heads", f"{whole[0]} does not divide {base.heads} heads")
        heads = tuple((base.kv_heads, base.head_dim) if each else whole for each in windowed)
        turns = {
            kind: read_rope(
                config, rope_parameters({"rope_parameters": section(ropes, kind)}, ROPES[kind]["rope_theta"]), width
            )
            for kind, width in (("sliding_attention", base.head_dim), ("full_attention", whole[1]))
        }
        bias = flag(config, "attention_bias")
        cap = config.get("final_logit_softcapping")
        return replace(
            base,
            activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
            attention_scale=1.0,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            layer_heads=heads,
            windows=read_windows({}, base.layers, window, [*windowed]),
            ropes=tuple(turns["sliding_attention" if each else "full_attention"] for each in windowed),
            final_softcap=0.0 if cap is None else number(config, "final_logit_softcapping"),
            keys_as_values=flag(config, "attention_k_eq_v"),
            shared=tuple(sources(windowed, _count(config, "num_kv_shared_layers")).items()),
            wide_shared=flag(config, "use_double_wide_mlp"),
            **_inputs(config, base.vocab_size),
            **_experts(config),
        )


def _count(config: dict[str, Any], key: str) -> int:
    """Return a number that may be 0."""
    return integer(config, key) if config.get(key) else 0


def _inputs(config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """The fields of what layers add per token; every token must have a row in the table."""
    width = _count(config, "hidden_size_per_layer_input")
    rows = integer(config, "vocab_size_per_layer_input") if width else 0
    if width and rows < vocab:
        raise malformed_error("vocab_size_per_layer_input", f"{rows} is less than vocab_size, {vocab}")
    return {"input_width": width, "input_vocab": rows}


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of mixtures."""
    if not flag(config, "enable_moe_block"):
        return {}
    experts, active = integer(config, "num_experts"), integer(config, "top_k_experts")
    if active > experts:
        why = f"{active} experts per token are requested, but the model has only {experts}"
        raise malformed_error("top_k_experts", why)
    return {"experts": experts, "experts_active": active, "expert_width": integer(config, "moe_intermediate_size")}


def complete(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model type and the text part of `config`, with the values of keys that files leave out."""
    model_type, text = text_part(config)
    null = "hidden_size_per_layer_input"  # means none, not the default
    stated = {key: value for key, value in text.items() if value is not None or key == null}
    return model_type, {**MODEL_TYPES[model_type].defaults, **stated}


class NormedAttention(Attention):
    """Attention whose values are normed, and made from the matrix of the keys where the layer has none for them.

    source   the earlier layer whose keys and values it reads, or None
    """

    is_gated = True  # a rotation of values could not be undone where they are made from keys
    v_proj: Linear | None  # type: ignore[assignment]

    def __init__(self, config: DecoderConfig, layer: int, norm: type[RMSNorm]) -> None:
        super().__init__(config, layer, norm)
        assert isinstance(config, Config)
        self.source = dict(config.shared).get(layer)
        if config.keys_as_values and not config.windows[layer]:
            self.v_proj = None
        if self.source is not None:
            del self.k_proj, self.v_proj, self.k_norm
        else:
            self.v_norm = ConstantRMSNorm(self.head_dim, config.eps)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears that read x."""
        found = (self.q_proj, self.k_proj, self.v_proj) if self.source is None else (self.q_proj,)
        return tuple(each for each in found if each is not None)

    def project(self, x: Tensor) -> Projected:
        """x [T, hidden] -> q, k and v."""
        keys = self.k_proj(x)
        return Projected(self.q_proj(x), keys, keys if self.v_proj is None else self.v_proj(x))

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if self.source is not None:
            q, found = self._turned(self.q_norm, self.q_proj(x), step), step.cache.read(self.layer, step.live)
        else:
            projected = self.project(x)
            v = self.v_norm(projected.v.view(x.shape[0], -1, self.head_dim))
            q, k = self._turned(self.q_norm, projected.q, step), self._turned(self.k_norm, projected.k, step)
            found = step.cache.update(self.layer, k, v, step.positions, step.live)
        out: Tensor = self.o_proj(self.attend(q, *found, step))
        return out

    def _turned(self, norm: RMSNorm, x: Tensor, step: Pass) -> Tensor:
        """x [T, heads * head_dim] -> normed and turned [T, heads, head_dim]."""
        assert self.rope_kind is not None
        return rotate(norm(x.view(x.shape[0], -1, self.head_dim)), *step.rotary[self.rope_kind])


class ScaledRouter(nn.Module):
    """Chooses experts by the normed stream; a number of each chosen one multiplies its weight. In f32."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.active, self.factor = config.experts_active, config.hidden**-0.5
        self.norm = ConstantRMSNorm(config.hidden, config.eps)
        self.proj = PlainLinear(config.hidden, config.experts, bias=False)
        self.scale = nn.Parameter(torch.empty(config.hidden))
        self.per_expert_scale = nn.Parameter(torch.empty(config.experts))

    def place(self) -> None:
        """Make the factor of the norm, which only kernels read, that of the stream as the matrix reads it."""
        self.norm.scale.copy_(self.scale.detach().float() * self.factor)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> weights f32 [T, k], and the chosen experts int64 [T, k]."""
        read = self.norm(x.float()) * self.scale.float() * self.factor
        largest, chosen = F.linear(read, self.proj.weight.float()).topk(self.active, -1)
        return torch.softmax(largest, -1) * self.per_expert_scale.float()[chosen], chosen


class GeluExperts(Experts):
    """Experts gated by the activation of the model, which kernels for experts do not compute."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, bias=False)
        self.gate = config.activation
        self.activation = ACTIVATIONS[config.activation]

    def combine(self, gate_up: Tensor) -> Tensor:
        """gate_up [rows, 2 * width], which may be written over -> [rows, width]."""
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate) * up


class ScalarBlock(SandwichBlock):
    """Norms on both sides of attention and MLP; then what the layer adds per token; a number multiplies the output."""

    attention_class = NormedAttention
    norm_class = WideRMSNorm

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config, Config)
        self.layer = layer
        self.layer_scalar = nn.Parameter(torch.empty(1))
        if config.input_width:
            self.per_layer_input_gate = Linear(config.hidden, config.input_width, bias=False)
            self.per_layer_projection = Linear(config.input_width, config.hidden, bias=False)
            self.post_per_layer_input_norm = self.norm_class(config.hidden, config.eps)

    def block_output(self, x: Tensor, layer_inputs: Tensor | None = None) -> Tensor:
        """x [T, hidden], the stream after the MLP -> what the block returns; layer_inputs: of the pass."""
        if layer_inputs is not None:
            gated = self.mlp.activation(self.per_layer_input_gate(x)) * layer_inputs[:, self.layer]
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar


class ParallelExpertBlock(ScalarBlock):
    """A block with experts beside its MLP, each with norms of their own; the router reads the stream itself."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.router, self.experts = ScaledRouter(config), GeluExperts(config)
        self.post_feedforward_layernorm_1 = self.norm_class(config.hidden, config.eps)
        self.pre_feedforward_layernorm_2 = self.norm_class(config.hidden, config.eps)
        self.post_feedforward_layernorm_2 = self.norm_class(config.hidden, config.eps)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), step))
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        routed = self.experts(self.pre_feedforward_layernorm_2(x), *self.router.route(x))
        out: Tensor = x + self.post_feedforward_layernorm(dense + self.post_feedforward_layernorm_2(routed))
        return self.block_output(out, step.layer_inputs)


class Model(ScaledDecoder):
    """A decoder of such blocks."""

    block_class = ScalarBlock
    layer_scale: float = 1.0  # multiplies the rows of the table of layer inputs

    def __init__(self, config: DecoderConfig) -> None:
        if config.experts:
            self.block_class = ParallelExpertBlock
        super().__init__(config)
        assert isinstance(config, Config)
        unread = ("k_proj", "v_proj", "k_norm", "v_norm")  # of layers that share: files may have them all the same
        self.redundant |= {
            f"layers.{layer}.self_attn.{part}.{kind}"
            for layer, _ in config.shared
            for part in unread
            for kind in ("weight", "bias")
        }
        if config.shared or config.input_width or config.experts:
            self.no_calibration = format_facts.NO_CALIBRATION
        if width := config.input_width:
            table = torch.empty(config.input_vocab, config.layers * width)
            self.embed_tokens_per_layer: nn.Embedding = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
            self.per_layer_model_projection = Linear(config.hidden, config.layers * width, bias=False)
            self.per_layer_projection_norm = WideRMSNorm(width, config.eps)

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """The cache of each layer."""
        assert isinstance(self.config, Config)
        shared = dict(self.config.shared)
        own = enumerate(super().cache_layout())
        return tuple(SharedCache(shared[layer]) if layer in shared else each for layer, each in own)

    def layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor | None:
        """ids int64 [T], x [T, hidden] of `embed` -> what layers add per token [T, layers, width]."""
        config = self.config
        assert isinstance(config, Config)
        if not config.input_width:
            return None
        found = x.new_empty(len(ids), config.layers, config.input_width)
        for some, read, out in zip(*(torch.split(each, INPUT_ROWS) for each in (ids, x, found)), strict=True):
            rows = (table_rows(self.embed_tokens_per_layer.weight, some) * self.layer_scale).view(out.shape)
            projected = (self.per_layer_model_projection(read) * config.hidden**-0.5).view(out.shape)
            torch.mul(self.per_layer_projection_norm(projected) + rows, 2.0**-0.5, out=out)
        return found

    @property
    def input_width(self) -> int:
        """Columns of what a layer adds per token; 0 where layers add nothing."""
        assert isinstance(self.config, Config)
        return self.config.input_width

    def make_tables(self, context: int, device: torch.device | str) -> None:
        """As `Decoder.make_tables`, and the constants of norms without weights."""
        super().make_tables(context, device)
        config = self.config
        assert isinstance(config, Config)
        self.layer_scale = torch.tensor(config.input_width**0.5).to(self.norm.weight.dtype).item()
        for module in self.modules():
            if isinstance(module, ConstantRMSNorm):
                module.place(device)
        for module in self.modules():
            if isinstance(module, ScaledRouter):
                module.place()
