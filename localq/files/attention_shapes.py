"""Heads of attention by layer, where layers differ: widths, matrices, and whose keys and values they read. Torch-free.

In Gemma 4 the layers without a window have heads of another number and width, and the last layers read the keys and
values of an earlier layer of their kind (after transformers' models/gemma4/configuration_gemma4.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localq.errors import bad_file

AGAIN = "Download the model again."
OVERRIDES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
MOST = 1024  # of heads, and of columns of a head


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a layer; sizes in elements.

    window          tokens that a token sees; 0: all
    keys, values    how many matrices make keys, and values: 1, or 0 where values are made from the keys' matrix, or
                    both are those of another layer
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    keys: int = 1
    values: int = 1

    @property
    def query_width(self) -> int:
        """Columns of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the keys of a token that the layer makes or reads."""
        return self.kv_heads * self.head_dim


def global_heads(text: Mapping[str, Any], windowed: Sequence[bool]) -> tuple[int, int]:
    """(KV heads, head_dim) of the layers without a window, from the text part of a config.json of Gemma 4.

    transformers writes them per layer (`per_layer_config`) from 5.24 on, before that as `global_head_dim` and
    `num_global_key_value_heads`, of which the second counts only with `attention_k_eq_v`. Raises LocalqError (exit 8)
    for other numbers, and for layers that differ in any other way.
    """
    found = {"head_dim": text.get("global_head_dim", text["head_dim"])}
    if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
        found["num_key_value_heads"] = text["num_global_key_value_heads"]
    if (stated := text.get("per_layer_config")) is not None:
        found = _alike(stated, windowed)
    numbers = tuple(found.get(key, text[key]) for key in ("num_key_value_heads", "head_dim"))
    for number in numbers:
        if type(number) is not int or not 1 <= number <= MOST:
            why = f"the full-attention layers have an invalid head size: {str(numbers)[:80]}"
            raise bad_file("config.json", why, AGAIN)
    return numbers


def heads_by_window(text: Mapping[str, Any], windowed: Sequence[bool]) -> tuple[int, int]:
    """Heads of the layers without a window, and of those with one, of a Laguna; 0 where there are no such layers.

    Raises LocalqError (exit 8) for layers of one kind that differ.
    """
    stated = text.get("num_attention_heads_per_layer")
    counts = [text["num_attention_heads"]] * len(windowed) if stated is None else stated
    if not isinstance(counts, list) or len(counts) != len(windowed):
        why = f"num_attention_heads_per_layer is not a list of {len(windowed)} numbers"
        raise bad_file("config.json", why, AGAIN)
    found = []
    for kind in (False, True):
        of_kind = [count for count, has_window in zip(counts, windowed, strict=True) if has_window == kind]
        if any(type(each) is not int or not 1 <= each <= MOST or each != of_kind[0] for each in of_kind):
            why = f"num_attention_heads_per_layer has an unsupported value: {str(counts)[:80]}"
            raise bad_file("config.json", why, AGAIN)
        found.append(of_kind[0] if of_kind else 0)
    return found[0], found[1]


def _alike(stated: Any, windowed: Sequence[bool]) -> dict[str, Any]:
    """Return the overrides in `per_layer_config`, which must be one set for exactly the layers without a window."""
    whole = {str(layer) for layer, has_window in enumerate(windowed) if not has_window}
    kinds = [*stated.values()] if isinstance(stated, dict) else []
    unlike = any(each != kinds[0] or not isinstance(each, dict) or each.keys() - OVERRIDES for each in kinds)
    if not isinstance(stated, dict) or unlike or (kinds and {str(key) for key in stated} != whole):
        why = f"per_layer_config has an unsupported value: {str(stated)[:80]}"
        raise bad_file("config.json", why, AGAIN)
    return dict(kinds[0]) if kinds else {}


def sources(windowed: Sequence[bool], shared: int) -> dict[int, int]:
    """Layer -> the earlier layer whose keys and values it reads, for the last `shared` layers.

    That is the last one of the same kind before them. Raises LocalqError (exit 8) where there is none.
    """
    first = len(windowed) - shared
    last = {kind: layer for layer, kind in enumerate(windowed[: max(first, 0)])}
    if shared and any(kind not in last for kind in windowed[max(first, 0) :]):
        why = f"num_kv_shared_layers is {shared}, which leaves no earlier layer of the same kind to share with"
        raise bad_file("config.json", why, AGAIN)
    return {layer: last[windowed[layer]] for layer in range(first, len(windowed))}
