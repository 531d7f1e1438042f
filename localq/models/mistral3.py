"""Mistral 3, the text part: a multimodal wrapper around a `mistral` or a `ministral3`.

Mistral Small 3.1 and 3.2 wrap a `mistral`, Ministral 3 and Devstral Small 2 a `ministral3`. The tensors of the vision
part are not read.
"""

from __future__ import annotations

from typing import Any

from localq.files.model_types import text_part
from localq.models import gemma3, ministral3, mistral
from localq.models.config import DecoderConfig
from localq.models.decoder import Decoder

Model = Decoder
rename = gemma3.rename  # the wrappers name their parts alike
FAMILIES = {"mistral": mistral, "ministral3": ministral3}


class Config(DecoderConfig):
    """Facts of the text part of a mistral3: those of its family."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> DecoderConfig:
        """From `config.json`, with `text_config` inside."""
        model_type, text = text_part(config)
        found: DecoderConfig = FAMILIES[model_type].Config.from_dict(text)
        return found
