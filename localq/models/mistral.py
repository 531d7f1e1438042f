"""Mistral: a llama whose layers may all share one sliding window (7B v0.1; later ones state null)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import llama
from localq.models.config import DecoderConfig, integer, unsupported_error
from localq.models.decoder import Decoder

Model = Decoder
rename = llama.rename
DEFAULT_WINDOW = 4096  # where the key is absent; null means none
DEFAULT_KV_HEADS = 8  # where the key is absent; null means as many as heads


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a mistral."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        if config.get("layer_types"):  # the reference passes over it, so what its author meant is not known
            raise unsupported_error("layer_types", config["layer_types"])
        base = cls.read({"num_key_value_heads": DEFAULT_KV_HEADS, **config})
        has_window = config.get("sliding_window", DEFAULT_WINDOW) is not None
        window = integer(config, "sliding_window", DEFAULT_WINDOW) if has_window else 0
        return replace(base, windows=(window,) * base.layers)
