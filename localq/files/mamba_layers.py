"""Mamba-2 layers of a Granite 4.0 model, and the width of their heads, from its config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localq.errors import bad_file
from localq.files.layer_parts import ATTENTION, LISTS, MAMBA, NAMES


def mamba_layers(text: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers with a Mamba-2; all where config.json names no kinds. Raises LocalqError (exit 8)."""
    key = next((key for key in LISTS if text.get(key) is not None), None)
    if key is None:
        return (True,) * layers
    stated = text[key]
    if not isinstance(stated, list) or len(stated) != layers:
        raise bad_file("config.json", f"{key} is not a list of {layers} names", "Download the model again.")
    kinds = [NAMES.get(each) if isinstance(each, str) else None for each in stated]
    if unknown := [each for each, kind in zip(stated, kinds, strict=True) if kind not in (MAMBA, ATTENTION)]:
        why = f"{key} has an unknown layer type: {str(unknown[0])[:40]!r}"
        raise bad_file("config.json", why, "Download the model again.")
    return tuple(kind == MAMBA for kind in kinds)


def mamba_columns(text: Mapping[str, Any]) -> int:
    """Columns of a head: `mamba_d_head`, or what `mamba_expand` gives each of them."""
    stated = text.get("mamba_d_head")
    if type(stated) is int:
        return stated
    numbers = [text.get(key) for key in ("mamba_expand", "hidden_size", "mamba_n_heads")]
    expand, hidden, heads = (each if type(each) is int and each > 0 else 0 for each in numbers)
    if stated not in (None, "auto") or not heads:
        why = f"mamba_d_head has an invalid value: {str(stated)[:40]}"
        raise bad_file("config.json", why, "Download the model again.")
    return int(expand * hidden // heads)


def is_turning(text: Mapping[str, Any]) -> bool:
    """Return whether attention has a rotary embedding."""
    return text.get("position_embedding_type") == "rope"
