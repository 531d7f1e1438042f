"""config.json of an LFM2 in the names of other families. Torch-free, for the planner and the engine alike.

After transformers' models/lfm2/configuration_lfm2.py and modeling_lfm2.py: `block_ff_dim` counts before
`intermediate_size`, and of the width that it states two thirds are used, as a multiple of `block_multiple_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from localq.errors import bad_file

AGAIN = "Download the model again."
ATTENTION, CONVOLUTION = "full_attention", "conv"  # of layer_types
MOST_WIDTH, MOST_LAYERS = 2**20, 256
_RENAMED = {"block_ff_dim": "intermediate_size", "norm_eps": "rms_norm_eps"}


def complete(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a config.json with `layer_types`, and the width of an MLP as it is.

    Raises LocalqError (exit 8) for values that no model can have.
    """
    found = {**text, **{new: text[old] for old, new in _RENAMED.items() if text.get(old) is not None}}
    # The second is that of published files; the first is what is written to a file whose head has become another.
    found.setdefault("tie_word_embeddings", found.get("tie_embedding", True))
    layers = _integer(found, "num_hidden_layers", MOST_LAYERS)
    if found.get("layer_types") is None:
        listed = found.get("full_attn_idxs")
        with_attention = range(layers) if listed is None else _indices(listed)
        found["layer_types"] = [ATTENTION if layer in with_attention else CONVOLUTION for layer in range(layers)]
    if found.get("block_auto_adjust_ff_dim"):
        found["intermediate_size"] = _adjusted(found)
    if "num_experts" in found:  # the lower layers have one MLP
        count = found.get("num_dense_layers")
        if type(count) is not int or not 0 <= count <= MOST_LAYERS:
            raise bad_file("config.json", f"num_dense_layers has an invalid value: {str(count)[:40]}", AGAIN)
        found["mlp_only_layers"] = [*range(min(count, layers))]
    return found


def _adjusted(text: Mapping[str, Any]) -> int:
    width, factor = int(2 * _integer(text, "intermediate_size", MOST_WIDTH) / 3), text.get("block_ffn_dim_multiplier")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 64:
        raise bad_file("config.json", f"block_ffn_dim_multiplier has an invalid value: {str(factor)[:40]}", AGAIN)
    multiple = _integer(text, "block_multiple_of", MOST_WIDTH)
    return multiple * math.ceil(int(factor * width) / multiple)


def _integer(text: Mapping[str, Any], key: str, most: int) -> int:
    value = text[key]
    if type(value) is not int or not 1 <= value <= most:
        raise bad_file("config.json", f"{key} has an invalid value: {str(value)[:40]}", AGAIN)
    return value


def _indices(listed: Any) -> set[int]:
    if not isinstance(listed, list) or any(type(each) is not int for each in listed):
        raise bad_file("config.json", f"full_attn_idxs has an invalid value: {str(listed)[:40]}", AGAIN)
    return {*listed}
