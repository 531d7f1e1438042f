"""Qwen2 and Qwen2.5: a llama with biases on queries, keys and values, and windows that are nearly always off."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import llama
from localq.models.config import DecoderConfig, flag, integer, read_windows
from localq.models.decoder import Decoder

Model = Decoder
rename = llama.rename


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a qwen2."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        base = cls.read(config)
        return replace(base, qkv_bias=True, windows=upper_windows(config, base.layers))


def upper_windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Windows of the layers from `max_window_layers` on; `sliding_window` is inert without `use_sliding_window`."""
    windowed = flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None
    if not windowed:
        return (0,) * layers
    first = 0 if config.get("max_window_layers") == 0 else integer(config, "max_window_layers", 28)
    return read_windows(config, layers, integer(config, "sliding_window", 4096), [i >= first for i in range(layers)])
