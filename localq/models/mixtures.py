"""Common part of qwen3_moe and mixtral: mixture facts in a `config.json`, and the block of one without biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from localq.models.config import DecoderConfig, integer, malformed_error, unsupported_error
from localq.models.decoder import Block, Decoder
from localq.models.experts import Experts, Mixture, Router

COUNTS = ("num_local_experts", "num_experts")  # both names of how many there are; a file has one of them


@dataclass(frozen=True)
class MixtureConfig(DecoderConfig):
    """Facts of a decoder with experts.

    dense     layers that have one MLP all the same
    routing   as in `experts.Router`
    """

    dense: frozenset[int] = frozenset()
    routing: str = "softmax_of_chosen"

    @classmethod
    def read_mixture(cls, config: dict[str, Any], width: str, theta: float) -> Self:
        """As `read`, and the facts of the experts. `width`: the key of the width of one of them."""
        for key in ("layer_types", "n_shared_experts", "shared_expert_intermediate_size"):
            if config.get(key):  # the reference passes over them, so what their author meant is not known
                raise unsupported_error(key, config[key])
        base = cls.read({key: value for key, value in config.items() if key not in COUNTS}, theta=theta)
        if base.activation != "silu":  # the one that the kernels for experts compute
            raise unsupported_error("hidden_act", base.activation)
        key = next((key for key in COUNTS if config.get(key) is not None), COUNTS[1])
        if config.get(key) == 0 and type(config[key]) is int:
            return base
        experts, active = integer(config, key), integer(config, "num_experts_per_tok")
        if active > experts:
            raise malformed_error(
                "num_experts_per_tok", f"{active} experts per token are requested, but the model has only {experts}"
            )
        return replace(base, experts=experts, experts_active=active, expert_width=integer(config, width))


class MixtureBlock(Block):
    """A block whose MLP is a mixture, unless its layer is one of `dense`."""

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Add a mixture, or an MLP in a dense layer."""
        assert isinstance(config, MixtureConfig)
        if not config.experts or layer in config.dense:
            super().add_mlp(config, layer)
            return
        router = Router(config, bias=False, how=config.routing)
        # What works on the matrices of an MLP asks first what it is.
        self.mlp = Mixture(router, Experts(config, bias=False))  # type: ignore[assignment]


class MixtureDecoder(Decoder):
    """A decoder of such blocks."""

    block_class = MixtureBlock
