"""Qwen3.5 and 3.6 as mixtures of experts (35B-A3B): a qwen3_5 whose MLPs are mixtures with a shared expert.

After transformers' models/qwen3_5_moe/modeling_qwen3_5_moe.py. Its softmax over all experts, divided by the sum of what
was chosen, is the softmax over the chosen ones. Every token goes through the shared expert too, whose output is
multiplied by the sigmoid of a gate. `qwen3_5_moe` is the multimodal wrapper around `qwen3_5_moe_text`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import qwen3_5
from localq.models.config import DecoderConfig, integer, malformed_error, unsupported_error
from localq.models.experts import Experts, Router, SharedExpertMixture

rename = qwen3_5.rename
DENSE_KEYS = ("mlp_only_layers", "n_shared_experts")  # the reference passes over them


@dataclass(frozen=True)
class Config(qwen3_5.Config):
    """Facts of a qwen3_5_moe.

    shared_width   of the shared expert's MLP
    """

    shared_width: int = 0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`, plain (`qwen3_5_moe_text`) or with `text_config` inside (`qwen3_5_moe`)."""
        config = qwen3_5.complete(config)
        for key in DENSE_KEYS:
            if config.get(key):
                raise unsupported_error(key, config[key])
        experts, active = integer(config, "num_experts"), integer(config, "num_experts_per_tok")
        if active > experts:
            raise malformed_error(
                "num_experts_per_tok", f"{active} experts per token are requested, but the model has only {experts}"
            )
        return replace(
            cls.read_hybrid({**config, "num_experts": None}),
            experts=experts,
            experts_active=active,
            expert_width=integer(config, "moe_intermediate_size"),
            shared_width=integer(config, "shared_expert_intermediate_size"),
        )


class SharedBlock(qwen3_5.HybridBlock):
    """A block whose MLP is a mixture with a shared expert."""

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add the mixture."""
        assert isinstance(config, Config)
        router, experts = Router(config, bias=False, how=config.routing), Experts(config, bias=False)
        shared = self.mlp_class(config.hidden, config.shared_width, config.activation, bias=False)
        # What works on the matrices of an MLP asks first what it is.
        self.mlp = SharedExpertMixture(router, experts, shared, config.hidden)  # type: ignore[assignment]


class Model(qwen3_5.Model):
    """A decoder of such blocks."""

    block_class = SharedBlock
