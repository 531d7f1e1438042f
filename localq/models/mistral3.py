"""Mistral 3, the text part: the multimodal wrapper around a `mistral` (Mistral Small 3.1 and 3.2) or a `ministral3`
(Ministral 3, Devstral Small 2). The tensors of its vision part stay unread.
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
