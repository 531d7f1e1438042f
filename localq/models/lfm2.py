"""LFM2 and LFM2.5: layers with a short convolution between some of attention.

After transformers' models/lfm2/modeling_lfm2.py. Norms of queries and keys are over each head; the last norm is called
`embedding_norm` in the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn

from localq.files import short_convolutions
from localq.files.layer_caches import KeysAndValues, LayerCache
from localq.files.model_types import MODEL_TYPES
from localq.files.short_convolutions import ATTENTION, CONVOLUTION
from localq.models import qwen3_moe
from localq.models.config import DecoderConfig, flag, integer, malformed_error, unsupported_error
from localq.models.decoder import Decoder
from localq.models.mixtures import MixtureBlock, MixtureConfig
from localq.models.short_convolution import ConvolutionMixer, ConvolutionShape

THETA = 1_000_000.0
NO_CONVOLUTION = ConvolutionShape(0, 0, False)
_NAMES = {  # of files -> of the model
    "embedding_norm": "norm", "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
    "q_layernorm": "q_norm", "k_layernorm": "k_norm",
}  # fmt: skip
_PART = re.compile(r"(?<![^.])(?:" + "|".join(_NAMES) + r")(?![^.])")
_OUTPUT, _SELECTION = ".self_attn.out_proj.", ".mlp.expert_bias"


@dataclass(frozen=True)
class Config(MixtureConfig):
    """Facts of an lfm2.

    convolution   the shape of its short convolutions
    convolved     the layers that have one
    """

    convolution: ConvolutionShape = NO_CONVOLUTION
    convolved: frozenset[int] = frozenset()

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        return cls.read_convolutions(complete("lfm2", config))

    @classmethod
    def read_convolutions(cls, config: dict[str, Any]) -> Self:
        """The facts but those of a mixture, from the `complete` one."""
        types = config["layer_types"]
        base = cls.read({key: value for key, value in config.items() if key != "layer_types"}, theta=THETA)
        if not isinstance(types, list) or len(types) != base.layers:
            raise malformed_error("layer_types", f"not a list of {base.layers} names")
        for name in types:
            if name not in (ATTENTION, CONVOLUTION):
                raise unsupported_error("layer_types", name)
        return replace(
            base,
            activation="silu",  # whatever the file says
            qk_norm=True,
            convolution=ConvolutionShape(base.hidden, integer(config, "conv_L_cache"), flag(config, "conv_bias")),
            convolved=frozenset(layer for layer, name in enumerate(types) if name == CONVOLUTION),
        )


def complete(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` in the names of other families, with the values of keys that files leave out."""
    stated = {key: value for key, value in config.items() if value is not None}
    return short_convolutions.complete({**MODEL_TYPES[model_type].defaults, "norm_eps": 1e-5, **stated})


class ConvolutionBlock(MixtureBlock):
    """A block with a short convolution or with attention."""

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """Create what mixes the tokens in this `layer`."""
        assert isinstance(config, Config)
        self.is_convolved = layer in config.convolved
        if self.is_convolved:
            self.conv = ConvolutionMixer(config.convolution, layer)
        else:
            super().add_mixer(config, layer)

    def mixer(self) -> nn.Module:
        """Return what mixes the tokens."""
        return self.conv if self.is_convolved else self.self_attn


class Model(Decoder):
    """A decoder of such blocks."""

    block_class = ConvolutionBlock

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """The cache of each layer."""
        config = self.config
        assert isinstance(config, Config)
        grows, state = KeysAndValues(config.kv_heads, config.head_dim), config.convolution.cache
        return tuple(state if layer in config.convolved else grows for layer in range(config.layers))


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; of an expert's matrix as in `qwen3_moe.rename`."""
    key = _PART.sub(lambda match: _NAMES[match[0]], key).replace(_OUTPUT, ".self_attn.o_proj.")
    return qwen3_moe.rename(key.replace(_SELECTION, ".mlp.router.selection_bias"))
