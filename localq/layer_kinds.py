"""Which layers of a model are windowed, and which have no experts, as its config.json says. Torch-free."""

from __future__ import annotations

from typing import Any

from localq.errors import bad_file


def dense_layers(text: dict[str, Any], layers: int) -> int:
    """Layers without experts: those that are named, and all but every `decoder_sparse_step`-th.

    Raises LocalqError (exit 8).
    """
    named, step = text.get("mlp_only_layers", []), text.get("decoder_sparse_step", 1)
    if type(step) is not int or step < 1 or not isinstance(named, list) or any(type(each) is not int for each in named):
        why = f"mlp_only_layers {str(named)[:40]} and decoder_sparse_step {str(step)[:40]} name no layers"
        raise bad_file("config.json", why, "Fetch the model again.")
    return len({layer for layer in range(layers) if (layer + 1) % step} | ({*named} & {*range(layers)}))


def windows(model_type: str, text: dict[str, Any], layers: int) -> tuple[int, int]:
    """(window in tokens, windowed layers). transformers 5 lists `layer_types`; before, the family's rule holds.

    Raises LocalqError (exit 8).
    """
    window = text.get("sliding_window") or 0
    optional = model_type in ("qwen2", "qwen3", "qwen3_moe", "smollm3")  # a window is stated there, and inert
    if not window or (optional and not text.get("use_sliding_window", False)):
        return 0, 0
    if types := text.get("layer_types"):
        count = sum(kind == "sliding_attention" for kind in types)
    elif model_type in ("gemma2", "gpt_oss"):
        count = (layers + 1) // 2  # layers 0, 2, 4, ...
    elif model_type in ("gemma3", "gemma3_text"):
        pattern = text.get("sliding_window_pattern") or 6
        if type(pattern) is not int or pattern < 1:  # other families write letters here
            raise bad_file("config.json", f"sliding_window_pattern is {str(pattern)[:40]}", "Fetch the model again.")
        count = layers - layers // pattern
    elif model_type in ("qwen2", "qwen3"):
        count = max(layers - (text.get("max_window_layers") or 0), 0)
    elif model_type == "smollm3":  # the layers without a rotary embedding, for which its list has zeros
        turning, interval = text.get("no_rope_layers"), text.get("no_rope_layer_interval")
        every = interval if type(interval) is int and interval > 0 else 4
        count = turning.count(0) if isinstance(turning, list) else layers // every
    else:
        count = layers  # mistral, mixtral, phi3, qwen3_moe: every layer
    return (window, count) if count else (0, 0)
