"""Laguna: windowed layers with more heads than the others, a gate per head, and experts beside a shared one.

After transformers' models/laguna/modeling_laguna.py. The softplus of a gate, one number per head, multiplies what the
head gathers. Layers with a window turn all columns of a head, the others some of them by a longer wavelength. The first
layers have a dense MLP. Files name the shared expert and the numbers of the router as older versions did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from localq.files import format_facts
from localq.files.attention_shapes import heads_by_window
from localq.files.layer_patterns import sparse_layers
from localq.files.model_types import MODEL_TYPES
from localq.models import qwen3_moe
from localq.models.attention import Attention, Pass
from localq.models.config import (
    DecoderConfig,
    flag,
    integer,
    malformed_error,
    number,
    read_rope,
    read_windows,
    rope_parameters,
    section,
    unsupported_error,
)
from localq.models.decoder import Block, Decoder
from localq.models.experts import Experts, SigmoidRouter, SummedMixture
from localq.models.layers import GatedMLP, PlainLinear, RMSNorm
from localq.models.rope import Rope, rotate

TRAITS = MODEL_TYPES["laguna"]
ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
FIXED = {"gating": (True, "per-head"), "moe_apply_router_weight_on_input": (False,), "hidden_act": ("silu",)}
OLD_NAMES = {  # of files -> ours
    ".mlp.experts.e_score_correction_bias": ".mlp.router.selection_bias",
    ".mlp.router.e_score_correction_bias": ".mlp.router.selection_bias",
    ".mlp.shared_expert.": ".mlp.shared_experts.",
}
IN_F32 = (".router.weight", ".router.selection_bias")
EPSILON = 1e-20  # beside the sum of the weights


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a laguna; `heads` are those of layers without a window.

    window_heads    of the others
    sparse          the layers with experts
    shared_width    of the MLP of the shared expert
    expert_factor   multiplies the weights of the chosen experts
    """

    window_heads: int = 0
    sparse: frozenset[int] = frozenset()
    shared_width: int = 0
    expert_factor: float = 1.0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**TRAITS.defaults, **{key: value for key, value in config.items() if value is not None}}
        for key, values in FIXED.items():
            if config.get(key) is not None and config[key] not in values:
                raise unsupported_error(key, config[key])
        if config.get("moe_router_logit_softcapping"):
            raise unsupported_error("moe_router_logit_softcapping", config["moe_router_logit_softcapping"])
        layers, stated = integer(config, "num_hidden_layers"), section(config, "rope_parameters") or ROPES
        window = integer(config, "sliding_window")
        windows = read_windows(config, layers, window, [False] * layers)
        whole, windowed = heads_by_window(config, [each > 0 for each in windows])
        own = {"num_attention_heads": whole or windowed, "rope_parameters": None, "rope_scaling": None}
        base = cls.read({**config, **own, "num_experts": None, "layer_types": None})
        for count in filter(None, (whole, windowed)):
            if count % base.kv_heads:
                raise malformed_error("num_attention_heads_per_layer", f"{base.kv_heads} does not divide {count}")
        turns = {kind: _rope(config, stated, kind, base.head_dim) for kind in ROPES}
        bias = flag(config, "attention_bias")
        sparse = sparse_layers(config, layers)
        base = replace(
            base,
            qk_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            windows=windows,
            ropes=tuple(turns["sliding_attention" if each else "full_attention"] for each in windows),
            window_heads=windowed or base.heads,
            sparse=frozenset(layer for layer, each in enumerate(sparse) if each),
        )
        return replace(base, **_experts(config)) if base.sparse else base


def _rope(config: dict[str, Any], stated: dict[str, Any], kind: str, head_dim: int) -> Rope:
    own = section(stated, kind) or ROPES[kind]
    return read_rope(config, rope_parameters({"rope_parameters": own}, ROPES[kind]["rope_theta"]), head_dim)


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of mixtures."""
    experts, active = integer(config, "num_experts"), integer(config, "num_experts_per_tok")
    if active > experts:
        why = f"{active} experts per token are requested, but the model has only {experts}"
        raise malformed_error("num_experts_per_tok", why)
    return {
        "experts": experts,
        "experts_active": active,
        "expert_width": integer(config, "moe_intermediate_size"),
        "shared_width": integer(config, "shared_expert_intermediate_size"),
        "expert_factor": number(config, "moe_routed_scaling_factor", 1.0),
    }


class HeadGatedAttention(Attention):
    """Attention with a number per head that multiplies what the head gathers."""

    is_gated = True

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the linears of this layer, which may have heads of another number."""
        assert isinstance(config, Config)
        self.heads = config.window_heads if self.window else config.heads
        super().add_projections(config)
        self.g_proj = PlainLinear(config.hidden, self.heads, bias=False)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate = self.g_proj(x)
        q, k = self._turned(self.q_norm, self.q_proj(x), step), self._turned(self.k_norm, self.k_proj(x), step)
        v = self.v_proj(x).view(x.shape[0], self.kv_heads, self.head_dim)
        attended = self.attend(q, *step.cache.update(self.layer, k, v, step.positions, step.live), step)
        projected: Tensor = self.o_proj(self.gated(attended, gate))
        return projected

    def _turned(self, norm: RMSNorm, x: Tensor, step: Pass) -> Tensor:
        """x [T, heads * head_dim] -> normed and turned [T, heads, head_dim]."""
        assert self.rope_kind is not None
        return rotate(norm(x.view(x.shape[0], -1, self.head_dim)), *step.rotary[self.rope_kind])

    def gated(self, attended: Tensor, gate: Tensor) -> Tensor:
        """attended [T, heads * head_dim], which is written over, gate [T, heads] -> the shape of attended."""
        factor = F.softplus(gate.float()).to(attended.dtype)
        return attended.view(*gate.shape, -1).mul_(factor[..., None]).view(attended.shape)


class SparseBlock(Block):
    """A block whose MLP is a mixture beside a shared expert, unless its layer is dense."""

    attention_class = HeadGatedAttention

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add the mixture, or an MLP."""
        assert isinstance(config, Config)
        if layer not in config.sparse:
            super().add_mlp(config, layer)
            return
        router = SigmoidRouter(config, selection_bias=True, epsilon=EPSILON, factor=config.expert_factor)
        shared = GatedMLP(config.hidden, config.shared_width, config.activation, bias=False)
        # What works on the matrices of an MLP asks first what it is.
        self.mlp = SummedMixture(router, Experts(config, bias=False), shared)  # type: ignore[assignment]


class Model(Decoder):
    """A decoder of such blocks."""

    block_class = SparseBlock
    no_calibration = format_facts.NO_CALIBRATION
    no_kernel = f"no kernel supports {TRAITS.no_kernel}"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.in_f32 = frozenset(name for name, _ in self.named_parameters() if name.endswith(IN_F32))


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; of an expert's matrix as in `qwen3_moe.rename`."""
    name = qwen3_moe.rename(key)
    old = next((old for old in OLD_NAMES if name and old in name), "")
    return name.replace(old, OLD_NAMES[old]) if name and old else name
