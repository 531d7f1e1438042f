"""Qwen3: norms on the queries and keys of every head, a head width of its own, no biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models import llama
from localq.models.config import DecoderConfig, flag
from localq.models.decoder import Decoder
from localq.models.qwen2 import upper_windows

Model = Decoder
rename = llama.rename
DEFAULTS = {"head_dim": 128}


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a qwen3."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        base, bias = cls.read({**DEFAULTS, **config}), flag(config, "attention_bias")
        windows = upper_windows(config, base.layers)
        return replace(base, qk_norm=True, qkv_bias=bias, output_bias=bias, windows=windows)
