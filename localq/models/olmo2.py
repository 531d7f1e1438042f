"""OLMo 2: an olmo3 without windows, whose layers all turn alike.

After transformers' models/olmo2/modeling_olmo2.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.files.model_types import MODEL_TYPES
from localq.models import llama, olmo3
from localq.models.config import DecoderConfig, flag, unsupported_error

Model = olmo3.Model
rename = llama.rename


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of an olmo2."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`."""
        for key in ("layer_types", "sliding_window"):
            if config.get(key):  # the reference passes over them, so what their author meant is not known
                raise unsupported_error(key, config[key])
        config = {**MODEL_TYPES["olmo2"].defaults, "rms_norm_eps": 1e-5, **config}
        base, bias = cls.read(config), flag(config, "attention_bias")
        return replace(base, qkv_bias=bias, output_bias=bias)
