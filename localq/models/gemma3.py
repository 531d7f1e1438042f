"""Gemma 3, the text part: gemma 2 without soft caps, with query and key norms, five windowed layers to one global.

The two kinds of layers have each their own rotary embedding. `gemma3` is the multimodal wrapper around
`gemma3_text`: the tensors of its vision part stay unread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localq.files.extra_tensors import is_beside_text
from localq.models import gemma2, llama
from localq.models.config import DecoderConfig, integer, read_rope, read_windows, rope_parameters, section
from localq.models.gemma2 import gemma_facts

Model = gemma2.Model

DEFAULTS = {  # files of this family leave out what equals the class defaults of transformers
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Facts of a gemma3 (the text part of one with vision)."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Config:
        """From `config.json`, plain (`gemma3_text`) or with `text_config` inside (`gemma3`)."""
        config = {**DEFAULTS, **_text_part(config)}
        spread, local = _rope_parts(config)
        base = cls.read({**config, "rope_scaling": None, "rope_parameters": spread}, tied=True)
        pattern = integer(config, "sliding_window_pattern", 6)
        windows = read_windows(
            config,
            base.layers,
            integer(config, "sliding_window"),
            [(layer + 1) % pattern != 0 for layer in range(base.layers)],
        )
        near = read_rope(config, rope_parameters({"rope_parameters": local}, LOCAL_THETA), base.head_dim)
        ropes = tuple(near if window else rope for window, rope in zip(windows, base.ropes, strict=True))
        return replace(base, windows=windows, ropes=ropes, qk_norm=True, **gemma_facts(config))


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    return section(config, "text_config") if "text_config" in config else config


def _rope_parts(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary parameters of the global and of the windowed layers; scaling in old files is the global layers'."""
    nested = section(config, "rope_parameters")
    spread = {
        "rope_theta": config.get("rope_theta", GLOBAL_THETA),
        **section(config, "rope_scaling"),
        **section(nested, "full_attention"),
    }
    local = {
        "rope_theta": config.get("rope_local_base_freq", LOCAL_THETA),
        **section(nested, "sliding_attention"),
    }
    return spread, local


def rename(key: str) -> str | None:
    """Checkpoint key -> parameter name; None = not ours (vision, and what projects it)."""
    if is_beside_text(key):
        return None
    for prefix in TEXT_PREFIXES:
        key = key.removeprefix(prefix)
    return llama.rename(key)
