"""gpt-oss: a mixture of experts with attention sinks, biases everywhere, every other layer windowed, untruncated YaRN.

After transformers' models/gpt_oss/modeling_gpt_oss.py and openai/gpt-oss, torch/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from localq.models import llama
from localq.models.config import DecoderConfig, flag, integer, malformed_error, number, read_windows
from localq.models.decoder import Block, Decoder
from localq.models.experts import Experts, Mixture, Router
from localq.models.layers import WideRMSNorm

rename = llama.rename
DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "max_position_embeddings": 131_072,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
THETA = 150_000.0
TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")
YARN = {  # where the file says nothing
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a gpt_oss.

    swiglu_alpha   gain of the sigmoid in the gate
    swiglu_limit   gate is cut above it, up on both sides
    """

    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**DEFAULTS, **config}
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config["rope_scaling"] = YARN
        experts, active = integer(config, "num_local_experts"), integer(config, "num_experts_per_tok")
        if active > experts:
            raise malformed_error(
                "num_experts_per_tok", f"{active} experts per token are requested, but the model has only {experts}"
            )
        base = cls.read({key: value for key, value in config.items() if key != "num_local_experts"}, theta=THETA)
        even = [layer % 2 == 0 for layer in range(base.layers)]
        bias = flag(config, "attention_bias")
        return replace(
            base,
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
            windows=read_windows(config, base.layers, integer(config, "sliding_window"), even),
            experts=experts,
            expert_width=base.intermediate,
            experts_active=active,
            swiglu_alpha=number(config, "swiglu_alpha", cls.swiglu_alpha),
            swiglu_limit=number(config, "swiglu_limit", cls.swiglu_limit),
        )


class ClampedExperts(Experts):
    """Gate and up alternate; gate * sigmoid(alpha * gate) * (up + 1), both clamped."""

    gate = "clamped"
    interleaved = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Config)
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def combine(self, gate_up: Tensor) -> Tensor:
        """Clamp gate and up, and combine them."""
        gate = gate_up[:, 0::2].clamp(max=self.limit)
        up = gate_up[:, 1::2].clamp(-self.limit, self.limit)
        gated = gate.mul(self.alpha).sigmoid_().mul_(gate)  # in place: the rows of the MLP are the largest tensors
        return gated.mul_(up.add_(1))


class ExpertBlock(Block):
    """A block whose MLP is a mixture."""

    norm_class = WideRMSNorm

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add the mixture."""
        # What works on the matrices of an MLP asks for `config.experts` first.
        self.mlp = Mixture(Router(config), ClampedExperts(config))  # type: ignore[assignment]


class Model(Decoder):
    """A decoder of mixtures. In 16 bit its files hold the matrices of experts as [experts, in, out]."""

    block_class = ExpertBlock

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        names = (name for name, _ in self.named_parameters() if name.endswith(TRANSPOSED))
        self.transposed = frozenset(names)
