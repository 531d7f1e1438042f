"""The model types that localq supports, one record of traits each. Torch-free.

A new architecture is a record in `MODEL_TYPES`, a module in `localq.models.ARCHITECTURES` and an entry in models.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localq.errors import LocalqError, bad_file


def dense_layers(text: dict[str, Any], layers: int) -> int:
    """Number of layers without experts, from `mlp_only_layers` and `decoder_sparse_step`.

    Raises LocalqError (exit 8).
    """
    named, step = text.get("mlp_only_layers", []), text.get("decoder_sparse_step", 1)
    if type(step) is not int or step < 1 or not isinstance(named, list) or any(type(each) is not int for each in named):
        why = f"mlp_only_layers ({str(named)[:40]}) or decoder_sparse_step ({str(step)[:40]}) is invalid"
        raise bad_file("config.json", why, "Download the model again.")
    return len({layer for layer in range(layers) if (layer + 1) % step} | ({*named} & {*range(layers)}))


def _every_layer(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return (True,) * layers


def _every_second(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return tuple(layer % 2 == 0 for layer in range(layers))


def _all_but_every_nth(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    pattern = text.get("sliding_window_pattern") or 6
    if type(pattern) is not int or pattern < 1:  # other families have a string of letters here
        raise bad_file(
            "config.json",
            f"sliding_window_pattern has an invalid value: {str(pattern)[:40]}",
            "Download the model again.",
        )
    return tuple((layer + 1) % pattern != 0 for layer in range(layers))


def upper_layers(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers from `max_window_layers` on."""
    return tuple(layer >= (text.get("max_window_layers") or 0) for layer in range(layers))


def _all_but_every_fourth_from_the_last(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    return tuple((layers - 1 - layer) % 4 != 0 for layer in range(layers))


def _without_rotary(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers without RoPE: the zeros of `no_rope_layers`."""
    has_rope, interval = text.get("no_rope_layers"), text.get("no_rope_layer_interval")
    every = interval if type(interval) is int and interval > 0 else 4
    if isinstance(has_rope, list):
        return tuple(each == 0 for each in has_rope[:layers])
    return tuple((layer + 1) % every == 0 for layer in range(layers))


def recurrent_layers(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers with a gated delta net: by `layer_types`, else all but every `full_attention_interval`-th."""
    if types := text.get("layer_types"):
        return tuple(kind == "linear_attention" for kind in types)
    interval = text.get("full_attention_interval") or 4
    return tuple((layer + 1) % interval != 0 for layer in range(layers))


@dataclass(frozen=True)
class Traits:
    """Differences of a model type from llama.

    defaults            values for keys that config.json may omit: those of transformers' configuration class
    fused               q, k and v are one matrix, gate and up another
    qkv_bias, mlp_bias  biases that the family always has
    qk_norm, four_norms norms of q and k; two more norms per layer
    norms_in_f32        weights of norms stay in f32
    offset_norms        norms multiply by 1 + weight, which is kept in f32
    hybrid              some layers have a gated delta net instead of attention, and attention has a gate
    partial_rotary      only the first columns of a head turn, as `partial_rotary_factor` says
    soft_cap            attention scores are capped, which rules out fused attention
    constant_norms      norms of the embedding, q and k without weights
    attention_gate      a matrix like q, whose result multiplies what the heads gather
    growing_queries     queries are multiplied by a number that grows with the position, from a table
    two_rotary_tables   windowed layers have their own rotary tables
    optional_window     config.json states a window that has no effect without `use_sliding_window`
    windowed_layers     (config.json, layers) -> which layers are windowed, for files without `layer_types`

    experts             per layer if config.json has no count; 0 for a family without mixtures
    own_expert_width    experts are `moe_intermediate_size` wide, and layers may be dense; else `intermediate_size`
    expert_module, expert_parts  names of a mixture in files: its module, and the matrices of each part of a stack; ""
                        for experts that are published as stacks only
    interleaved_experts rows of gate and up of an expert alternate, and have biases
    published_experts   the format in which experts are published and stay; "" for that of the other matrices
    sinks               attention sinks, one per head, and experts with clamped activations
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    four_norms: bool = False
    norms_in_f32: bool = False
    offset_norms: bool = False
    hybrid: bool = False
    partial_rotary: bool = False
    soft_cap: bool = False
    constant_norms: bool = False
    attention_gate: bool = False
    growing_queries: bool = False
    two_rotary_tables: bool = False
    optional_window: bool = False
    windowed_layers: Callable[[dict[str, Any], int], tuple[bool, ...]] = _every_layer

    experts: int = 0
    own_expert_width: bool = False
    expert_module: str = ""
    expert_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved_experts: bool = False
    published_experts: str = ""
    sinks: bool = False


_GEMMA3 = Traits(
    defaults={
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "max_position_embeddings": 131_072, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    qk_norm=True, four_norms=True, two_rotary_tables=True, windowed_layers=_all_but_every_nth,
)  # fmt: skip
_QWEN3_5_DEFAULTS = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_QWEN3_5 = Traits(
    defaults=_QWEN3_5_DEFAULTS, qk_norm=True, offset_norms=True, hybrid=True, partial_rotary=True,
)  # fmt: skip
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    defaults={
        **_QWEN3_5_DEFAULTS, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    experts=256, own_expert_width=True, expert_module="mlp",
    expert_parts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
)  # fmt: skip
_UPPER = {"sliding_window": 4096, "max_window_layers": 28}
# model_type -> its traits. A new one also needs a module in `localq.models`.
MODEL_TYPES: dict[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral3": Traits(
        defaults={
            "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
        },
        growing_queries=True,
    ),
    "mixtral": Traits(
        defaults={"num_experts_per_tok": 2},
        experts=8,
        expert_module="block_sparse_moe",
        expert_parts={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    ),
    "qwen2": Traits(defaults=_UPPER, qkv_bias=True, optional_window=True, windowed_layers=upper_layers),
    "qwen3": Traits(
        defaults={**_UPPER, "head_dim": 128}, qk_norm=True, optional_window=True, windowed_layers=upper_layers
    ),
    "qwen3_moe": Traits(
        defaults={"num_experts_per_tok": 8, "moe_intermediate_size": 768, "sliding_window": 4096},
        qk_norm=True,
        optional_window=True,
        experts=128,
        own_expert_width=True,
        expert_module="mlp",
        expert_parts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "gemma2": Traits(
        defaults={
            "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True,
        },
        four_norms=True, soft_cap=True, windowed_layers=_every_second,
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "muse_glimmer_text": Traits(
        defaults={
            "vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
            "sliding_window": 2048,
        },
        four_norms=True, constant_norms=True, attention_gate=True, windowed_layers=_all_but_every_fourth_from_the_last,
    ),
    "phi3": Traits(fused=True),
    "smollm3": Traits(
        defaults={"tie_word_embeddings": True}, optional_window=True, windowed_layers=_without_rotary
    ),
    "gpt_oss": Traits(
        defaults={"head_dim": 64, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4},
        mlp_bias=True,
        norms_in_f32=True,
        windowed_layers=_every_second,
        experts=128,
        interleaved_experts=True,
        published_experts="mxfp4",
        sinks=True,
    ),
}  # fmt: skip


# Wrappers around a text model -> its types; the first where `text_config` states none.
WRAPPERS = {"mistral3": ("mistral", "ministral3"), "muse_glimmer": ("muse_glimmer_text",)}


def text_part(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model type of the text model, and its part of a config.json: `text_config`, or all of a flat one.

    `tie_word_embeddings` outside `text_config` counts first in a wrapper, whose head is outside the text model, and
    last elsewhere. Raises LocalqError (exit 1) for an unsupported model type.
    """
    model_type, inner = config.get("model_type"), config.get("text_config")
    text = dict(inner) if isinstance(inner, dict) else dict(config)
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    if isinstance(model_type, str) and model_type in WRAPPERS:
        supported = WRAPPERS[model_type]
        stated = inner.get("model_type") if isinstance(inner, dict) else None
        model_type = supported[0] if stated is None else stated
        text |= tied
    else:
        supported = tuple(MODEL_TYPES)
        text = {**tied, **{key: value for key, value in text.items() if value is not None or key not in tied}}
    if not isinstance(model_type, str) or model_type not in supported:
        named, where = repr(model_type)[:80], f" in {config['model_type']}" if supported != tuple(MODEL_TYPES) else ""
        known = ", ".join(sorted({*MODEL_TYPES, *WRAPPERS}))
        raise LocalqError("config.json", f"the architecture {named}{where} is not supported", f"Supported: {known}.")
    return model_type, text


def windows(model_type: str, text: dict[str, Any], layers: int) -> tuple[int, tuple[bool, ...]]:
    """(window in tokens, which layers are windowed): from `layer_types` (transformers 5), else by family.

    (0, ()) if none is. Raises LocalqError (exit 8).
    """
    traits, window = MODEL_TYPES[model_type], text.get("sliding_window") or 0
    if not window or (traits.optional_window and not text.get("use_sliding_window", False)):
        return 0, ()
    if types := text.get("layer_types"):
        windowed = tuple(kind == "sliding_attention" for kind in types)
    else:
        windowed = traits.windowed_layers(text, layers)
    return (window, windowed) if any(windowed) else (0, ())
