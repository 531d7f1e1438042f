"""Qwen3-VL, the text part: a qwen3 whose positions have three axes, which are equal in a text.

After transformers' models/qwen3_vl/modeling_qwen3_vl.py. `qwen3_vl` is the multimodal wrapper around `qwen3_vl_text`:
the tensors of its tower are not read, and what the tower adds to the first layers is nothing without images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.files.model_types import MODEL_TYPES, text_part
from localq.models import gemma3
from localq.models.config import DecoderConfig, flag, section
from localq.models.decoder import Decoder
from localq.models.qwen3_5 import ROPE_KEYS, one_axis

Model = Decoder
rename = gemma3.rename  # the wrappers name their parts alike
THETA = 500_000.0


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a qwen3_vl."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`, plain (`qwen3_vl_text`) or with `text_config` inside (`qwen3_vl`)."""
        model_type, text = text_part(config)
        null = "num_key_value_heads"  # means as many as heads, not the default
        stated = {key: value for key, value in text.items() if value is not None or key == null}
        config = {**MODEL_TYPES[model_type].defaults, **stated}
        config |= {key: one_axis(section(config, key)) for key in ROPE_KEYS}
        base, bias = cls.read(config, theta=THETA), flag(config, "attention_bias")
        return replace(base, qk_norm=True, qkv_bias=bias, output_bias=bias)
