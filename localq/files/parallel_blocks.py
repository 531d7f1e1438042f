"""config.json of a Cohere2 with experts: which layers have a window, a dense MLP, a rotary embedding. Torch-free.

After transformers' models/cohere2_moe/configuration_cohere2_moe.py and modeling_cohere2_moe.py. For the planner and the
engine alike: `complete` first, then the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localq.errors import bad_file

AGAIN = "Download the model again."
MOST_WIDTH, MOST_LAYERS = 2**20, 256
KINDS = {"layer_types": ("sliding_attention", "full_attention"), "mlp_layer_types": ("dense", "sparse")}
DENSE_PATTERN = "prefix_dense_sliding_window_pattern"


def complete(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a config.json with `layer_types` and `mlp_layer_types`.

    The first `first_k_dense_replace` layers are dense, and their windows have a pattern of their own. Raises
    LocalqError (exit 8) for values that no model can have.
    """
    found = dict(text)
    layers = _integer(found, "num_hidden_layers", 1, MOST_LAYERS)
    dense = _integer(found, "first_k_dense_replace", 0, layers)
    of_dense, of_others = (_integer(found, key, 1, MOST_LAYERS) for key in (DENSE_PATTERN, "sliding_window_pattern"))
    if found.get("layer_types") is None:
        whole = [(layer + 1) % of_dense == 0 for layer in range(dense)]
        whole += [(layer + 1) % of_others == 0 for layer in range(layers - dense)]
        found["layer_types"] = [KINDS["layer_types"][each] for each in whole]
    if found.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = [KINDS["mlp_layer_types"][layer >= dense] for layer in range(layers)]
    for key, kinds in KINDS.items():
        listed = found[key]
        if not isinstance(listed, list) or len(listed) != layers or any(each not in kinds for each in listed):
            raise bad_file("config.json", f"{key} is not a list of {layers} values ({' or '.join(kinds)})", AGAIN)
    return found


def turning_layers(text: Mapping[str, Any]) -> tuple[bool, ...]:
    """The layers with a rotary embedding: those with a window, and dense ones where no dense layer has a window."""
    kinds = zip(text["layer_types"], text["mlp_layer_types"], strict=True)
    return tuple(kind == "sliding_attention" or (mlp == "dense" and text[DENSE_PATTERN] == 1) for kind, mlp in kinds)


def sparse_of(text: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers with experts."""
    return tuple(layer for layer, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse")


def mlp_widths(text: Mapping[str, Any]) -> tuple[int, int]:
    """Width of a dense MLP, and of all shared experts of a layer together. Raises LocalqError (exit 8)."""
    width = _integer(text, "intermediate_size", 1, MOST_WIDTH)
    stated = text.get("prefix_dense_intermediate_size")
    dense = width if stated is None else _integer(text, "prefix_dense_intermediate_size", 1, MOST_WIDTH)
    return dense, width * _integer(text, "num_shared_experts", 0, MOST_WIDTH // width)


def _integer(text: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = text[key]
    if type(value) is not int or not least <= value <= most:
        raise bad_file("config.json", f"{key} has an invalid value: {str(value)[:40]}", AGAIN)
    return value
