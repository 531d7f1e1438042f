"""The model types that localq supports, one record of traits each. Torch-free.

A new architecture is a record in `MODEL_TYPES`, a module in `localq.models.ARCHITECTURES` and an entry in models.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localq.errors import LocalqError, bad_file
from localq.files.layer_patterns import (
    all_but_evenly_spaced,
    all_but_every_fourth,
    all_but_every_fourth_from_the_last,
    all_but_every_nth,
    by_letters,
    every_layer,
    every_second,
    no_layer,
    upper_layers,
    without_rotary,
)


@dataclass(frozen=True)
class Traits:
    """Differences of a model type from llama.

    defaults            values for keys that config.json may omit: those of transformers' configuration class
    fused               q, k and v are one matrix, gate and up another
    qkv_bias, mlp_bias  biases that the family always has
    qk_norm, four_norms norms of q and k; two more norms per layer
    wide_norms          norms of q and k are over all heads together
    post_norms          the norms of a layer are behind attention and the MLP, and none is before them
    norms_in_f32        weights of norms stay in f32
    offset_norms        norms multiply by 1 + weight, which is kept in f32
    hybrid              some layers have a gated delta net instead of attention, and attention has a gate
    mamba               recurrent layers are Mamba-2
    one_part            a layer has one part, behind one norm: a Mamba-2, attention, experts or an MLP (`layer_parts`)
    multipliers         constants multiply what goes into the stream; a shared MLP is beside the experts, or instead
    fused_mlp           gate and up of MLPs are one matrix, but not of experts
    ungated_mlp         MLPs and experts have no gate
    parallel            attention and the MLP read one norm, and what both give is added to the stream; the first
                        layers may be dense, with windows of their own
    head_gates          a number per head multiplies what the head gathers, and windowed layers may have other heads
    latents             all heads make keys and values from one latent per token, and only some columns of a head turn;
                        experts are beside a shared one, and the first layers may be dense
    no_kernel           what of a decode step no kernel computes, in a few words; "" if kernels compute all
    partial_rotary      only the first columns of a head turn, as `partial_rotary_factor` says
    soft_cap            attention scores are capped, which rules out fused attention
    scaled_logits       a number multiplies the logits, by the last norm, which is in f32
    constant_norms      norms of the embedding, q and k without weights
    attention_gate      a matrix like q, whose result multiplies what the heads gather
    short_convolution   some layers have a short convolution instead of attention
    sigmoid_router      routers weigh by sigmoids; with `use_expert_bias`, numbers per expert count in the choice only
    two_head_sizes      layers without a window have heads of another width, and another number of KV heads; values are
                        normed without weights, a number multiplies the output of a layer, and experts are beside the
                        dense MLP, with norms of their own
    growing_queries     queries are multiplied by a number that grows with the position, from a table
    two_rotary_tables   windowed layers have their own rotary tables
    optional_window     config.json states a window that has no effect without `use_sliding_window`
    windowed_layers     (config.json, layers) -> which layers are windowed, for files without `layer_types`

    experts             per layer if config.json has no count; 0 for a family without mixtures
    own_expert_width    experts are `moe_intermediate_size` wide, and layers may be dense; else `intermediate_size`
    expert_module, expert_parts  names of a mixture in files: its module, and the matrices of each part of a stack; ""
                        for experts that are published as stacks only, or without a module around them
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
    wide_norms: bool = False
    post_norms: bool = False
    norms_in_f32: bool = False
    offset_norms: bool = False
    hybrid: bool = False
    mamba: bool = False
    one_part: bool = False
    multipliers: bool = False
    fused_mlp: bool = False
    ungated_mlp: bool = False
    parallel: bool = False
    head_gates: bool = False
    latents: bool = False
    sigmoid_router: bool = False
    no_kernel: str = ""
    partial_rotary: bool = False
    soft_cap: bool = False
    scaled_logits: bool = False
    constant_norms: bool = False
    attention_gate: bool = False
    short_convolution: bool = False
    two_head_sizes: bool = False
    growing_queries: bool = False
    two_rotary_tables: bool = False
    optional_window: bool = False
    windowed_layers: Callable[[dict[str, Any], int], tuple[bool, ...]] = every_layer

    experts: int = 0
    own_expert_width: bool = False
    expert_module: str = ""
    expert_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved_experts: bool = False
    published_experts: str = ""
    sinks: bool = False

    @property
    def norms_behind(self) -> bool:
        """True if norms follow attention and the MLP."""
        return self.four_norms or self.post_norms


_GEMMA3 = Traits(
    defaults={
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "max_position_embeddings": 131_072, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    qk_norm=True, four_norms=True, two_rotary_tables=True, windowed_layers=all_but_every_nth,
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
_GEMMA4 = Traits(
    defaults={
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262_144,
        "max_position_embeddings": 131_072, "sliding_window": 512, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
    },
    qk_norm=True, four_norms=True, two_head_sizes=True, two_rotary_tables=True,
    windowed_layers=all_but_evenly_spaced,
    expert_parts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
)  # fmt: skip
_GEMMA4_UNIFIED = replace(
    _GEMMA4, defaults={
        **_GEMMA4.defaults, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    },
)  # fmt: skip
_LFM2 = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    "conv_L_cache": 3, "conv_bias": False,
}  # fmt: skip
_NEMOTRON_H = Traits(
    defaults={
        "hidden_size": 4096, "intermediate_size": 21_504, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131_072, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    mamba=True, one_part=True, ungated_mlp=True, sigmoid_router=True, norms_in_f32=True,
    no_kernel="Mamba-2 layers", own_expert_width=True, experts=8, expert_module="mixer",
    expert_parts={"up_proj": ("up_proj",), "down_proj": ("down_proj",)},
)  # fmt: skip
_GRANITE = Traits(
    defaults={
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
        "mamba_d_conv": 4, "mamba_expand": 2,
    },
    mamba=True, multipliers=True, fused_mlp=True, no_kernel="Mamba-2 layers and multipliers", experts=8,
    expert_module="block_sparse_moe",
    expert_parts={
        **dict.fromkeys(("gate_up_proj", "input_linear.weight"), ("gate_proj", "up_proj")),
        **dict.fromkeys(("down_proj", "output_linear.weight"), ("down_proj",)),
    },
)  # fmt: skip
_LAGUNA = Traits(
    defaults={
        "vocab_size": 100_352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "sliding_window": 512, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    qk_norm=True, two_rotary_tables=True, windowed_layers=no_layer, head_gates=True, sigmoid_router=True,
    no_kernel="per-head gates", own_expert_width=True, experts=256, expert_module="mlp",
    expert_parts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
)  # fmt: skip
_COHERE2_MOE = Traits(
    defaults={
        "vocab_size": 256_000, "hidden_size": 8192, "intermediate_size": 22_528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "sliding_window": 4096, "sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1,
        "first_k_dense_replace": 0, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
        "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
    },
    parallel=True, scaled_logits=True, no_kernel="parallel blocks", windowed_layers=all_but_every_fourth, experts=8,
    expert_module="mlp",
    expert_parts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
)  # fmt: skip
_GLM4_MOE_LITE = Traits(
    defaults={
        "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240, "num_hidden_layers": 47,
        "num_attention_heads": 20, "max_position_embeddings": 202_752, "kv_lora_rank": 512, "q_lora_rank": 768,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    },
    latents=True, sigmoid_router=True, no_kernel="latent attention", experts=64, expert_module="mlp",
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
        qk_norm=True, optional_window=True, experts=128, own_expert_width=True, expert_module="mlp",
        expert_parts={"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    ),
    "qwen3_vl_text": Traits(
        defaults={
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128_000,
        },
        qk_norm=True,
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "cohere2_moe": _COHERE2_MOE,
    "gemma2": Traits(
        defaults={
            "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True,
        },
        four_norms=True, soft_cap=True, windowed_layers=every_second,
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "muse_glimmer_text": Traits(
        defaults={
            "vocab_size": 202_048, "hidden_size": 6656, "intermediate_size": 19_968, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
            "sliding_window": 2048,
        },
        four_norms=True, constant_norms=True, attention_gate=True, windowed_layers=all_but_every_fourth_from_the_last,
    ),
    "exaone4": Traits(
        defaults={
            "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
            "sliding_window": 4096, "sliding_window_pattern": 4,
        },
        qk_norm=True, post_norms=True, windowed_layers=by_letters,
    ),
    "granite": Traits(
        defaults={
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "max_position_embeddings": 2048,
        },
        scaled_logits=True,
    ),
    "lfm2": Traits(
        defaults={
            **_LFM2, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
        },
        qk_norm=True, short_convolution=True,
    ),
    "lfm2_moe": Traits(
        defaults={
            **_LFM2, "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
            "num_experts_per_tok": 4, "num_dense_layers": 2, "use_expert_bias": True,
        },
        qk_norm=True, short_convolution=True, sigmoid_router=True, experts=32, own_expert_width=True,
        expert_module="feed_forward", expert_parts={"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
    ),
    "olmo2": Traits(
        defaults={"max_position_embeddings": 2048}, qk_norm=True, wide_norms=True, post_norms=True, norms_in_f32=True,
    ),
    "olmo3": Traits(
        defaults={"max_position_embeddings": 2048, "sliding_window": 4096},
        qk_norm=True, wide_norms=True, post_norms=True, norms_in_f32=True, two_rotary_tables=True,
        windowed_layers=all_but_every_fourth,
    ),
    "glm4_moe_lite": _GLM4_MOE_LITE,
    "granitemoehybrid": _GRANITE,
    "laguna": _LAGUNA,
    "nemotron_h": _NEMOTRON_H,
    "phi3": Traits(fused=True),
    "seed_oss": Traits(
        defaults={
            "vocab_size": 155_136, "hidden_size": 4096, "intermediate_size": 27_648, "num_hidden_layers": 64,
            "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288,
            "attention_bias": True, "attention_out_bias": False,
        },
    ),
    "smollm3": Traits(
        defaults={"tie_word_embeddings": True}, optional_window=True, windowed_layers=without_rotary
    ),
    "gpt_oss": Traits(
        defaults={"head_dim": 64, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4},
        mlp_bias=True, norms_in_f32=True, windowed_layers=every_second, experts=128, interleaved_experts=True,
        published_experts="mxfp4", sinks=True,
    ),
}  # fmt: skip


# Wrappers around a text model -> its types; the first where `text_config` states none.
WRAPPERS = {
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "mistral3": ("mistral", "ministral3"),
    "muse_glimmer": ("muse_glimmer_text",),
    "qwen3_vl": ("qwen3_vl_text",),
}


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
        if not isinstance(types, list):
            raise bad_file("config.json", "layer_types is not a list", "Download the model again.")
        windowed = tuple(kind == "sliding_attention" for kind in types)
        if traits.two_head_sizes:  # the last layer has none, whatever the file says
            windowed = (*windowed[:-1], False)
    else:
        windowed = traits.windowed_layers(text, layers)
    return (window, windowed) if any(windowed) else (0, ())
