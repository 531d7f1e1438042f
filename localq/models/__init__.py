"""Architectures by `model_type`. A module exports `Config`, `Model` and `rename`; nothing else is needed of it."""

from __future__ import annotations

from types import ModuleType

from localq.models import llama

ARCHITECTURES: dict[str, ModuleType] = {
    "llama": llama,
}
