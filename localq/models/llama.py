"""Llama 2 to 3.3, SmolLM2 and all that took their form: the plain decoder, with biases where the file asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.models.config import DecoderConfig, flag
from localq.models.decoder import Decoder

Model = Decoder


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a llama."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        bias = flag(config, "attention_bias")
        return replace(cls.read(config), qkv_bias=bias, output_bias=bias, mlp_bias=flag(config, "mlp_bias"))


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; None = not ours (frequencies that old files store)."""
    if key.endswith("rotary_emb.inv_freq"):
        return None
    return key.removeprefix("model.")
