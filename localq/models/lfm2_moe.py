"""LFM2 and LFM2.5 as mixtures of experts (8B-A1B): an lfm2 whose MLPs are mixtures, but for the lower layers.

After transformers' models/lfm2_moe/modeling_lfm2_moe.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import lfm2
from localq.models.config import DecoderConfig, flag, integer, malformed_error, number
from localq.models.experts import Experts, Mixture, SigmoidRouter

rename = lfm2.rename
EPSILON = 1e-6  # beside the sum of the chosen


@dataclass(frozen=True)
class Config(lfm2.Config):
    """Facts of an lfm2_moe.

    selection_bias   numbers, one per expert, that count in the choice only
    normed           weights of the chosen experts are divided by their sum
    routed_factor    multiplies these weights
    """

    selection_bias: bool = True
    normed: bool = True
    routed_factor: float = 1.0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = lfm2.complete("lfm2_moe", config)
        base = cls.read_convolutions({**config, "num_experts": None})
        dense = frozenset(config["mlp_only_layers"])
        if len(dense) == base.layers:
            return base
        experts, active = integer(config, "num_experts"), integer(config, "num_experts_per_tok")
        if active > experts:
            why = f"{active} experts per token are requested, but the model has only {experts}"
            raise malformed_error("num_experts_per_tok", why)
        return replace(
            base,
            experts=experts,
            experts_active=active,
            expert_width=integer(config, "moe_intermediate_size"),
            dense=dense,
            routing="sigmoid",
            selection_bias=flag(config, "use_expert_bias", True),
            normed=flag(config, "norm_topk_prob", True),
            routed_factor=number(config, "routed_scaling_factor", 1.0),
        )


class SigmoidBlock(lfm2.ConvolutionBlock):
    """A block whose router weighs by the sigmoid of each expert by itself."""

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add a mixture, or an MLP in a dense layer."""
        assert isinstance(config, Config)
        if not config.experts or layer in config.dense:
            super().add_mlp(config, layer)
            return
        router = SigmoidRouter(
            config,
            selection_bias=config.selection_bias,
            epsilon=EPSILON if config.normed else None,
            factor=config.routed_factor,
        )
        # What works on the matrices of an MLP asks first what it is.
        self.mlp = Mixture(router, Experts(config, bias=False))  # type: ignore[assignment]


class Model(lfm2.Model):
    """A decoder of such blocks."""

    block_class = SigmoidBlock

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.in_f32 = frozenset(name for name, _ in self.named_parameters() if name.endswith(".selection_bias"))
