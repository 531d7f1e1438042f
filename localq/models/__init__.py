"""Architectures by `model_type`. A module exports `Config`, `Model` and `rename`; nothing else is needed of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from localq.errors import LocalqError
from localq.models import gemma2, gemma3, gpt_oss, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe, smollm3

ARCHITECTURES: dict[str, ModuleType] = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
}


def architecture(config: dict[str, Any]) -> ModuleType:
    """The module for a `config.json`; one of an unknown `model_type` is refused by name."""
    name = config.get("model_type")
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    known = ", ".join(ARCHITECTURES)
    raise LocalqError("config.json: model_type", f"localq does not know {repr(name)[:80]}", f"Known: {known}.")
