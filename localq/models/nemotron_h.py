"""Nemotron-H: Nemotron Nano and Nemotron 3. Layers have one part each: a Mamba-2, attention, experts or an MLP.

After transformers' models/nemotron_h/modeling_nemotron_h.py. A layer is x + part(norm(x)). Attention has no rotary
embedding; MLPs and experts have no gates, but square what their relu leaves; what a shared expert gives is added to the
weighted sum of the chosen ones. Files call every part `mixer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from localq.files import format_facts
from localq.files.extra_tensors import is_beside_text
from localq.files.layer_caches import EmptyCache, KeysAndValues, LayerCache
from localq.files.layer_parts import ATTENTION, EXPERTS, MAMBA, MLP, layer_parts
from localq.files.model_types import MODEL_TYPES
from localq.models import llama, mamba2
from localq.models.attention import Attention, Pass
from localq.models.config import DecoderConfig, flag, integer, malformed_error, number, unsupported_error
from localq.models.decoder import Block, Decoder, Norms
from localq.models.experts import SigmoidRouter, SummedMixture, UngatedExperts
from localq.models.layers import PlainMLP, WideRMSNorm
from localq.models.mamba2 import Mamba2, MambaShape

TRAITS = MODEL_TYPES["nemotron_h"]
FIXED = {  # as all published models have them
    "mamba_hidden_act": ("silu",), "mlp_hidden_act": ("relu2",), "use_conv_bias": (True,), "use_bias": (False,),
    "mlp_bias": (False,), "attention_bias": (False,), "tie_word_embeddings": (False,),
}  # fmt: skip
NAMES = {"embeddings": "embed_tokens", "norm_f": "norm"}  # as the files call them, and as the model does
MIXER = {  # first word of what is in a mixer -> where it is in the model
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("experts", "shared_experts", "up_proj", "down_proj"), "mlp"),
    **dict.fromkeys(("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj"), "mamba"),
}
EPSILON = 1e-20  # beside the sum of the weights
IN_F32 = (*mamba2.IN_F32, ".router.weight", ".router.selection_bias")  # as in the reference


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a nemotron_h.

    parts           of every layer (`files.layer_parts`)
    mamba           the shape of its Mamba-2 layers; None without any
    shared_width    of the MLP of the shared expert
    normalized, expert_factor, expert_groups, active_groups   as of `SigmoidRouter`
    """

    parts: tuple[str, ...] = ()
    mamba: MambaShape | None = None
    shared_width: int = 0
    normalized: bool = True
    expert_factor: float = 1.0
    expert_groups: int = 1
    active_groups: int = 1

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**TRAITS.defaults, **{key: value for key, value in config.items() if value is not None}}
        for key, values in FIXED.items():
            if config.get(key) is not None and config[key] not in values:
                raise unsupported_error(key, config[key])
        for key in ("moe_latent_size", "sliding_window"):
            if config.get(key):
                raise unsupported_error(key, config[key])
        parts = layer_parts(config)
        own = {"num_hidden_layers": len(parts), "rms_norm_eps": config["layer_norm_epsilon"], "hidden_act": "silu"}
        base = cls.read({**config, **own, "n_routed_experts": None, "rope_scaling": None, "rope_parameters": None})
        base = replace(base, ropes=(None,) * base.layers, parts=parts)
        base = replace(base, mamba=_mamba(config)) if MAMBA in parts else base
        return replace(base, **_experts(config)) if EXPERTS in parts else base


def _mamba(config: dict[str, Any]) -> MambaShape:
    groups = integer(config, "n_groups")
    return MambaShape(
        heads=integer(config, "mamba_num_heads"),
        head_dim=integer(config, "mamba_head_dim"),
        groups=groups,
        state=integer(config, "ssm_state_size"),
        kernel=integer(config, "conv_kernel"),
        norm_groups=groups,
    )


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of mixtures."""
    experts, active = integer(config, "n_routed_experts"), integer(config, "num_experts_per_tok")
    if active > experts:
        why = f"{active} experts per token are requested, but the model has only {experts}"
        raise malformed_error("num_experts_per_tok", why)
    groups, active_groups = integer(config, "n_group", 1), integer(config, "topk_group", 1)
    if experts % groups or active_groups > groups or active > experts // groups * active_groups:
        raise malformed_error(
            "n_group", f"{active} of {experts} experts cannot come from {active_groups} of {groups} groups"
        )
    if groups > 1 and experts // groups < 2:
        raise malformed_error("n_group", f"{experts} experts in {groups} groups leave fewer than two per group")
    return {
        "experts": experts,
        "experts_active": active,
        "expert_width": integer(config, "moe_intermediate_size"),
        "shared_width": integer(config, "moe_shared_expert_intermediate_size"),
        "normalized": flag(config, "norm_topk_prob", True),
        "expert_factor": number(config, "routed_scaling_factor", 1.0),
        "expert_groups": groups,
        "active_groups": active_groups,
    }


class OnePartBlock(Block):
    """x + part(norm(x))."""

    norm_class = WideRMSNorm

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        nn.Module.__init__(self)
        assert isinstance(config, Config)
        self.part = config.parts[layer]
        self.norm = self.norm_class(config.hidden, config.eps)
        if self.part == MAMBA:
            assert config.mamba is not None
            self.mamba = Mamba2(config.mamba, config.hidden, layer, config.eps)
        elif self.part == ATTENTION:
            self.self_attn = Attention(config, layer, self.norm_class)
        elif self.part == MLP:
            self.mlp = PlainMLP(config.hidden, config.intermediate)  # type: ignore[assignment]
        else:
            router = SigmoidRouter(
                config,
                selection_bias=True,
                epsilon=EPSILON if config.normalized else None,
                factor=config.expert_factor,
                groups=config.expert_groups,
                active_groups=config.active_groups,
            )
            shared = PlainMLP(config.hidden, config.shared_width)
            self.mlp = SummedMixture(router, UngatedExperts(config), shared)  # type: ignore[assignment]

    def mixer(self) -> nn.Module:
        """Return what mixes the tokens; the MLP where nothing does."""
        return self.get_submodule({MAMBA: "mamba", ATTENTION: "self_attn"}.get(self.part, "mlp"))

    def norms(self) -> Norms:
        """The one norm, before the part."""
        return Norms(self.norm, None, self.norm, None)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        part, normed = self.mixer(), self.norm(x)
        out: Tensor = x + (part(normed, step) if self.part in (MAMBA, ATTENTION) else part(normed))
        return out


class Model(Decoder):
    """A decoder of such blocks."""

    block_class = OnePartBlock
    no_calibration = format_facts.NO_CALIBRATION
    no_kernel = f"no kernel supports {TRAITS.no_kernel}"

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.in_f32 = frozenset(name for name, _ in self.named_parameters() if name.endswith(IN_F32))

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """The cache of each layer."""
        config = self.config
        assert isinstance(config, Config)
        kept: dict[str, LayerCache] = {ATTENTION: KeysAndValues(config.kv_heads, config.head_dim)}
        if config.mamba is not None:
            kept[MAMBA] = config.mamba.cache
        return tuple(kept.get(part, EmptyCache()) for part in config.parts)


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; None = not ours (drafts). Of experts as in `qwen3_moe.rename`."""
    name = None if is_beside_text(key) else llama.rename(key.removeprefix("backbone."))
    if name is None:
        return None
    first, dot, rest = name.partition(".")
    before, mixer, inside = rest.partition(".mixer.")
    if first != "layers" or not mixer:
        return NAMES.get(first, first) + dot + rest
    if inside.startswith("gate."):
        own = inside.removeprefix("gate.").replace("e_score_correction_bias", "selection_bias")
        return f"layers.{before}.mlp.router.{own}"
    return f"layers.{before}.{MIXER.get(inside.partition('.')[0], 'mixer')}.{inside}"
