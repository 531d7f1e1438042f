"""Kinds of a decoder's layers, by its config.json or the usual order of its family. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localq.errors import bad_file


def dense_layers(text: dict[str, Any], layers: int) -> int:
    """Number of layers without experts, from `mlp_only_layers` and `decoder_sparse_step`.

    Raises LocalqError (exit 8).
    """
    named, step = text.get("mlp_only_layers", []), text.get("decoder_sparse_step", 1)
    if type(step) is not int or step < 1 or not isinstance(named, list) or any(type(each) is not int for each in named):
        why = f"mlp_only_layers ({str(named)[:40]}) or decoder_sparse_step ({str(step)[:40]}) is invalid"
        raise bad_file("config.json", why, "Download the model again.")
    return len({layer for layer in range(layers) if (layer + 1) % step} | ({*named} & {*range(layers)}))


def every_layer(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return (True,) * layers


def no_layer(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return (False,) * layers


def sparse_layers(text: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers with experts, from `mlp_layer_types`; all but the first without it. Raises LocalqError (exit 8)."""
    kinds = text.get("mlp_layer_types")
    if kinds is None:
        return tuple(layer > 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(each not in ("dense", "sparse") for each in kinds):
        why = f"mlp_layer_types is not a list of {layers} values (dense or sparse)"
        raise bad_file("config.json", why, "Download the model again.")
    return tuple(each == "sparse" for each in kinds)


def routed_experts(text: Mapping[str, Any]) -> Any:
    """Experts of a layer: `n_routed_experts`, or `num_local_experts`, another name for it, where a file states it."""
    stated = text.get("num_local_experts")
    return text.get("n_routed_experts") if stated is None else stated


def every_second(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return tuple(layer % 2 == 0 for layer in range(layers))


def all_but_every_nth(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    pattern = text.get("sliding_window_pattern") or 6
    if type(pattern) is not int or pattern < 1:  # other families have a string of letters here
        raise bad_file(
            "config.json",
            f"sliding_window_pattern has an invalid value: {str(pattern)[:40]}",
            "Download the model again.",
        )
    return tuple((layer + 1) % pattern != 0 for layer in range(layers))


def by_letters(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """As `all_but_every_nth`, or by a string: those with an L in it, which is repeated; the last layer has none."""
    pattern = text.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return all_but_every_nth({"sliding_window_pattern": pattern or 4}, layers)
    if not pattern or pattern.strip("LG"):
        why = f"sliding_window_pattern has an invalid value: {pattern[:40]}"
        raise bad_file("config.json", why, "Download the model again.")
    return tuple(pattern[layer % len(pattern)] == "L" and layer != layers - 1 for layer in range(layers))


def upper_layers(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers from `max_window_layers` on."""
    return tuple(layer >= (text.get("max_window_layers") or 0) for layer in range(layers))


def all_but_evenly_spaced(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers without a window: every n-th and the last; n by their number `max_window_layers`, else 6."""
    whole = text.get("max_window_layers") or 0
    every = layers // whole if whole and layers % whole == 0 else 6
    return tuple((layer + 1) % every != 0 and layer != layers - 1 for layer in range(layers))


def all_but_every_fourth(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % 4 != 0 for layer in range(layers))


def all_but_every_fourth_from_the_last(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return tuple((layers - 1 - layer) % 4 != 0 for layer in range(layers))


def without_rotary(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers without RoPE: the zeros of `no_rope_layers`."""
    has_rope, interval = text.get("no_rope_layers"), text.get("no_rope_layer_interval")
    every = interval if type(interval) is int and interval > 0 else 4
    if isinstance(has_rope, list):
        return tuple(each == 0 for each in has_rope[:layers])
    return tuple((layer + 1) % every == 0 for layer in range(layers))


def recurrent_layers(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers with a recurrence instead of attention: by `layer_types`, else all but every
    `full_attention_interval`-th."""
    if types := text.get("layer_types"):
        return tuple(kind in ("linear_attention", "conv") for kind in types)
    interval = text.get("full_attention_interval") or 4
    return tuple((layer + 1) % interval != 0 for layer in range(layers))
