"""EXAONE 4: norms behind attention and the MLP only; layers without a window have no rotary embedding.

After transformers' models/exaone4/modeling_exaone4.py. Small models have no windows, and turn in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.files.model_types import MODEL_TYPES, windows
from localq.models import llama
from localq.models.config import DecoderConfig, integer, read_windows
from localq.models.decoder import Decoder
from localq.models.olmo3 import PostNormBlock

rename = llama.rename


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of an exaone4."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        config = {**MODEL_TYPES["exaone4"].defaults, "rms_norm_eps": 1e-5, **config}
        base = cls.read(config)
        if config["sliding_window"] is None:
            return replace(base, qk_norm=True)
        _, windowed = windows("exaone4", config, base.layers)
        found = read_windows(config, base.layers, integer(config, "sliding_window"), [*windowed])
        ropes = tuple(rope if window else None for rope, window in zip(base.ropes, found, strict=True))
        return replace(base, qk_norm=True, windows=found, ropes=ropes)


class Model(Decoder):
    """A decoder with such norms."""

    block_class = PostNormBlock
