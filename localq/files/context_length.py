"""The longest text of a model, from config.json: its positions, extended by the scaling of its rotary embedding.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST = 2**24  # tokens; far above any published model
# Kinds whose factor says how many times longer than in pretraining a text may be. For "longrope" and "llama3" the
# makers state the extended length in max_position_embeddings; for "yarn" often, for "linear" seldom.
_EXTENDING = ("yarn", "linear", "llama3", "longrope")
_STATES_THE_EXTENDED = ("gemma3", "gemma3_text")  # their linear factor is part of max_position_embeddings


def longest_context(config: Mapping[str, Any]) -> int:
    """Tokens that a model of this config.json (of its text model) reads: at least its max_position_embeddings.

    That is what the file states, or factor * original_max_position_embeddings where this is more: the entry that
    makers tell their users to add for long texts leaves max_position_embeddings as it was. Other engines derive the
    same. Values that are no lengths are ignored here; loading refuses them.
    """
    stated: int = config["max_position_embeddings"]
    entry = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(entry, Mapping) or config.get("model_type") in _STATES_THE_EXTENDED:
        return stated
    kind, factor = entry.get("rope_type") or entry.get("type"), entry.get("factor")
    if kind not in _EXTENDING or isinstance(factor, bool) or not isinstance(factor, int | float):
        return stated
    lengths = (config.get("original_max_position_embeddings"), entry.get("original_max_position_embeddings"))
    original = next((each for each in lengths if type(each) is int and 0 < each <= LONGEST), None)
    if original is None:
        if kind not in ("yarn", "linear"):
            return stated
        original = stated
    if not 1 <= factor <= LONGEST:  # NaN fails every comparison
        return stated
    return max(stated, min(round(factor * original), LONGEST))
