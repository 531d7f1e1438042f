"""config.json of a Gemma 4 from the metadata of its .gguf file, as llama.cpp's converter writes it. Torch-free.

After conversion/gemma.py of llama.cpp: keys that differ between layers are lists, heads of layers without a window
have the plain keys and those of the others end in `_swa`, and the divisors of frequencies are 1e30 where a pair stands
still.
"""

from __future__ import annotations

from typing import Any

from localq.errors import bad_file
from localq.files.gguf.facts import Facts

ARCHITECTURE = "gemma4"
_FREQUENCIES = "rope_freqs.weight"
_STILL = 1e30  # a frequency divided by it is none


def read_gemma4(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of config.json beyond the common ones, or instead of them. Raises LocalqError (exit 8)."""
    layers, heads, width = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    windowed = _windowed(facts, layers)
    keys = facts.integers("attention.head_count_kv", layers, heads)
    whole = windowed.index(False)
    sliding = windowed.index(True) if any(windowed) else whole
    widths = facts.integers("feed_forward_length", layers)
    table = facts.container.tensors.get("per_layer_token_embd.weight")
    shared = facts.get("attention.shared_kv_layers", int) or 0
    cap = facts.full("final_logit_softcapping") in facts.values
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": facts.integer("attention.key_length_swa", width),
        "global_head_dim": width,
        "num_key_value_heads": keys[sliding],
        "num_global_key_value_heads": keys[whole],
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in facts.container.tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": facts.integer("attention.sliding_window"),
        "final_logit_softcapping": facts.number("final_logit_softcapping") if cap else None,
        "hidden_size_per_layer_input": facts.get("embedding_length_per_layer_input", int) or 0,
        "vocab_size_per_layer_input": table.shape[0] if table else config["vocab_size"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": _turning(facts, width) / (width // 2),
            },
        },
        **_mixture(facts),
    }


def _windowed(facts: Facts, layers: int) -> list[bool]:
    """Return, per layer, whether it has a window; the last has none."""
    pattern = facts.values.get(facts.full("attention.sliding_window_pattern"))
    if not isinstance(pattern, list) or len(pattern) != layers or not all(type(each) is bool for each in pattern):
        raise facts.bad("attention.sliding_window_pattern", f"is not a list of {layers} booleans")
    return [*pattern[:-1], False]


def _turning(facts: Facts, width: int) -> int:
    """Pairs of columns that turn in layers without a window: the first ones."""
    tensor = facts.container.tensors.get(_FREQUENCIES)
    if tensor is None:
        return width // 2
    divisors = facts.floats(_FREQUENCIES, tensor, width // 2, largest=2 * _STILL)
    turning = sum(each == 1 for each in divisors)
    if turning == 0 or any(each < _STILL / 2 for each in divisors[turning:]):
        path = str(facts.container.path)
        raise bad_file(path, f"{_FREQUENCIES} does not match the RoPE of Gemma 4", "Download the file again.")
    return turning


def _mixture(facts: Facts) -> dict[str, Any]:
    """The keys of a mixture; its router is the family's own, and has no keys."""
    if not facts.get("expert_count", int):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": facts.integer("expert_count"),
        "top_k_experts": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
    }
