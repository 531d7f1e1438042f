"""SmolLM3: a llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import llama
from localq.models.config import DecoderConfig, flag, integer, malformed_error, read_windows
from localq.models.decoder import Decoder

Model = Decoder
rename = llama.rename
DEFAULT_THETA = 2_000_000.0


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a smollm3."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        base, bias = cls.read(config, theta=DEFAULT_THETA, tied=True), flag(config, "attention_bias")
        turning = _turning_layers(config, base.layers)
        window = 0
        if flag(config, "use_sliding_window") and config.get("sliding_window") is not None:
            window = integer(config, "sliding_window")
        return replace(
            base,
            ropes=tuple(rope if turns else None for rope, turns in zip(base.ropes, turning, strict=True)),
            windows=read_windows(config, base.layers, window, [not turns for turns in turning]),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=flag(config, "mlp_bias"),
        )


def _turning_layers(config: dict[str, Any], layers: int) -> list[bool]:
    """Return which layers have a rotary embedding: `no_rope_layers` has 1 for those (sic)."""
    stated = config.get("no_rope_layers")
    if stated is None:
        interval = integer(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(stated, list) or len(stated) < layers or any(turns not in (0, 1) for turns in stated):
        raise malformed_error("no_rope_layers", f"not a list of {layers} zeros and ones")
    return [bool(turns) for turns in stated[:layers]]
