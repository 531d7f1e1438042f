"""Configuration of a decoder: the facts of a `config.json`, read in both spellings, checked against hard limits.

Both spellings: files before transformers 5 have top-level `rope_theta` and `rope_scaling` (its kind under `type` or
`rope_type`); later ones have `rope_parameters`, for gemma3 one per layer type. What a model needs and we do not know
is refused by name, because a model that runs with a feature left out is worse than one that does not run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from localq import gpus
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.context_length import longest_context
from localq.models.layers import ACTIVATIONS
from localq.models.rope import FREQUENCIES, Rope

LIMITS = {  # far above any published model; a config beyond them is damaged or hostile
    "vocab_size": 2**20,
    "hidden_size": 2**16,
    "num_hidden_layers": 256,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "intermediate_size": 2**20,
    "max_position_embeddings": 2**24,
    "original_max_position_embeddings": 2**24,
    "sliding_window": 2**24,
    "max_window_layers": 256,
    "no_rope_layer_interval": 256,
    "sliding_window_pattern": 256,
    "num_local_experts": 4096,
    "num_experts": 4096,
    "num_experts_per_tok": 4096,
    "moe_intermediate_size": 2**20,
    "decoder_sparse_step": 256,
    "shared_expert_intermediate_size": 2**20,
    "full_attention_interval": 256,
    "linear_num_key_heads": 1024,
    "linear_num_value_heads": 1024,
    "linear_key_head_dim": 1024,
    "linear_value_head_dim": 1024,
    "linear_conv_kernel_dim": 64,
    "num_kv_shared_layers": 256,
    "hidden_size_per_layer_input": 2**12,
    "vocab_size_per_layer_input": 2**20,
    "top_k_experts": 4096,
    "conv_L_cache": 64,
    "n_routed_experts": 4096,
    "n_shared_experts": 512,
    "kv_lora_rank": 2**16,
    "q_lora_rank": 2**16,
    "qk_nope_head_dim": 1024,
    "qk_rope_head_dim": 1024,
    "v_head_dim": 1024,
    "n_group": 4096,
    "topk_group": 4096,
    "moe_shared_expert_intermediate_size": 2**20,
    "mamba_num_heads": 1024,
    "mamba_head_dim": 1024,
    "n_groups": 1024,
    "ssm_state_size": 1024,
    "conv_kernel": 64,
    "shared_intermediate_size": 2**20,
    "mamba_n_heads": 1024,
    "mamba_n_groups": 1024,
    "mamba_d_head": 1024,
    "mamba_d_state": 1024,
    "mamba_d_conv": 64,
    "mamba_expand": 64,
}
UNSUPPORTED = (  # known features of other models; true or set means that this model needs one
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "attention_sinks",
    "attention_chunk_size",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
)
MAX_CHARACTERS = 160  # of a file's text in a message
WINDOWED = {"full_attention": False, "sliding_attention": True}  # the supported layer types
QUERY_GROWTH = "llama_4_scaling_beta"  # in rope_parameters


@dataclass(frozen=True)
class DecoderConfig:
    """The facts of a decoder.

    head_dim            of queries, keys and values; heads * head_dim need not be hidden
    layer_heads         (KV heads, head_dim) per layer, where layers differ; () = as above in all
    eps                 of every norm
    tied                the embedding is also the head
    activation          a key of `layers.ACTIVATIONS`
    attention_scale     multiplies the scores
    ropes               per layer; None = no rotary embedding there
    windows             per layer, in tokens; 0 = the whole context
    qk_norm             norms of width head_dim on queries and keys
    *_softcap           x -> cap * tanh(x / cap); 0 = off
    sinks               a learned score per head that takes part in the softmax of attention and brings no value
    query_growth, query_period   queries at position p, turned, are multiplied by
                        1 + query_growth * ln(1 + floor(p / query_period)); 0 = never
    experts             of every layer that has any; 0 = one MLP of width `intermediate` in all layers
    experts_active      experts that a token goes through
    expert_width        of one expert's MLP
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_context: int
    eps: float
    tied: bool
    activation: str
    attention_scale: float
    ropes: tuple[Rope | None, ...]
    windows: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    sinks: bool = False
    query_growth: float = 0.0
    query_period: int = 0
    experts: int = 0
    experts_active: int = 0
    expert_width: int = 0
    layer_heads: tuple[tuple[int, int], ...] = ()

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return (KV heads, head_dim) of a layer."""
        return self.layer_heads[layer] if self.layer_heads else (self.kv_heads, self.head_dim)

    def width_of(self, layer: int) -> int:
        """Return the width of the MLP of a layer."""
        return self.intermediate

    @property
    def rope_kinds(self) -> tuple[Rope, ...]:
        """The distinct kinds of rotary embedding, in order of first use."""
        return tuple(dict.fromkeys(rope for rope in self.ropes if rope is not None))

    @classmethod
    def read(cls, config: dict[str, Any], *, theta: float = 10_000.0, tied: bool = False) -> Self:
        """The facts that every family states in the same way; a family replaces what it does differently.

        `theta` and `tied` are the family's defaults for files that leave them out.
        """
        refuse_unsupported(config)
        heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
        kv_heads = integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise malformed_error(
                "num_key_value_heads", f"{kv_heads} does not divide the number of attention heads, {heads}"
            )
        if config.get("head_dim") is None and hidden % heads:
            raise malformed_error("num_attention_heads", f"{heads} does not divide hidden_size, {hidden}")
        head_dim, layers = integer(config, "head_dim", hidden // heads), integer(config, "num_hidden_layers")
        return cls(
            vocab_size=integer(config, "vocab_size"),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=integer(config, "intermediate_size"),
            max_context=_longest_context(config),
            eps=number(config, "rms_norm_eps", 1e-6),
            tied=flag(config, "tie_word_embeddings", tied),
            activation=read_activation(config, "hidden_act", "silu"),
            attention_scale=head_dim**-0.5,
            ropes=(read_rope(config, rope_parameters(config, theta), head_dim),) * layers,
            windows=(0,) * layers,
        )


def _longest_context(config: dict[str, Any]) -> int:
    integer(config, "max_position_embeddings")  # refuses what is no length
    return longest_context(config)


def malformed_error(key: str, why: str) -> LocalqError:
    """Return the error for a value that no model can have."""
    return bad_file(f"config.json: {key}", why[:MAX_CHARACTERS], "The file is damaged; download the model again.")


def unsupported_error(key: str, value: object) -> LocalqError:
    """Return the error for a value of a feature that localq does not support."""
    why = f"localq does not support the value {repr(value)[:MAX_CHARACTERS]}"
    step = f"To list the models that localq can run on this machine, run {gpus.fit_command()}."
    return LocalqError(f"config.json: {key}", why, step, ExitCode.FAILURE)


def integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer within `LIMITS`; `default` where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise malformed_error(key, "missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise malformed_error(key, f"{value!r} is not an integer")
    if not 1 <= value <= LIMITS[key]:
        raise malformed_error(key, f"{value} is not between 1 and {LIMITS[key]}")
    return value


def number(
    config: dict[str, Any], key: str, default: float | None = None, low: float = 0.0, high: float = 1e12
) -> float:
    """Return a number above `low` and up to `high`; `default` where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise malformed_error(key, "missing")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise malformed_error(key, f"{value!r} is not a number")
    if not low < value <= high:  # NaN fails every comparison and so ends here too
        raise malformed_error(key, f"{value} is out of range (must be above {low:g} and at most {high:g})")
    return float(value)


def numbers(config: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    """Return `count` positive numbers."""
    values = config.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise malformed_error(key, f"not a list of {count} numbers")
    return tuple(number({key: value}, key) for value in values)


def section(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an object inside the file; empty where the key is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise malformed_error(key, f"{value!r} is not an object")
    return value


def flag(config: dict[str, Any], key: str, default: bool = False) -> bool:
    """Return true or false; `default` where the key is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise malformed_error(key, f"{value!r} is not true or false")
    return value


def refuse_unsupported(config: dict[str, Any]) -> None:
    """Reject models that need a feature which localq would otherwise ignore silently."""
    for key in UNSUPPORTED:
        if config.get(key):
            raise unsupported_error(key, config[key])


def read_activation(config: dict[str, Any], key: str, default: str) -> str:
    """Return the MLP's activation by name."""
    name = config.get(key) or default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise unsupported_error(key, name)
    return name


def read_windows(config: dict[str, Any], layers: int, window: int, windowed: list[bool]) -> tuple[int, ...]:
    """Return the window of every layer: by the file's `layer_types`, else by `windowed`, the family's pattern."""
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise malformed_error("layer_types", f"not a list of {layers} names")
        for name in types:
            if not isinstance(name, str) or name not in WINDOWED:
                raise unsupported_error("layer_types", name)
        windowed = [WINDOWED[name] for name in types]
    return tuple(window if inside else 0 for inside in windowed)


def rope_parameters(config: dict[str, Any], theta: float) -> dict[str, Any]:
    """Return the rotary parameters of a file with one set of them, in the newer spelling."""
    parameters = section(config, "rope_scaling") or section(config, "rope_parameters")
    # Three-axis positions; queries that grow, which ministral3 takes out; one set per layer type, which gemma3 unpacks.
    for key in ("mrope_section", QUERY_GROWTH, *WINDOWED):
        if key in parameters:
            raise unsupported_error("rope_parameters", key)
    return {
        "rope_theta": theta if config.get("rope_theta") is None else config["rope_theta"],
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        "rope_type": parameters.get("type", "default"),
        **{key: value for key, value in parameters.items() if value is not None},
    }


def read_rope(config: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> Rope:
    """Build a `Rope` from `rope_parameters`; `config` gives the context lengths that some kinds refer to."""
    kind = parameters["rope_type"]
    if not isinstance(kind, str) or kind not in FREQUENCIES:
        raise unsupported_error("rope_type", kind)
    rotary_dim = int(head_dim * number(parameters, "partial_rotary_factor", 1.0, high=1.0))
    if kind == "proportional":
        turning, rotary_dim = 2 * (rotary_dim // 2), head_dim
        factor = number(parameters, "factor", 1.0)
        return Rope(kind, number(parameters, "rope_theta", low=1.0), rotary_dim, factor, turning=turning)
    if rotary_dim < 2 or rotary_dim % 2:
        raise malformed_error(
            "partial_rotary_factor",
            f"results in {rotary_dim} rotary dimensions; the number must be even and at least 2",
        )
    rope = Rope(kind, number(parameters, "rope_theta", low=1.0), rotary_dim)
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=number(parameters, "factor"))
    return _read_scaled(config, parameters, rope)


def _read_scaled(config: dict[str, Any], parameters: dict[str, Any], rope: Rope) -> Rope:
    """Build the kinds that refer to the context length of the pretraining."""
    context = integer(config, "max_position_embeddings")
    stated = integer(parameters, "original_max_position_embeddings", context)
    original = integer(config, "original_max_position_embeddings", stated)
    factor = number(parameters, "factor", context / original)
    rope = replace(rope, factor=factor, original_context=original)
    if rope.kind == "llama3":
        low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
        if low >= high:
            raise malformed_error("low_freq_factor", f"{low} is not less than high_freq_factor, {high}")
        return replace(rope, low_frequency_factor=low, high_frequency_factor=high)
    if rope.kind == "yarn":
        return replace(
            rope,
            attention_factor=_yarn_attention_factor(parameters, factor),
            beta_fast=number(parameters, "beta_fast", 32.0),
            beta_slow=number(parameters, "beta_slow", 1.0),
            truncate=flag(parameters, "truncate", True),
        )
    grown = 1.0 if factor <= 1.0 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        attention_factor=number(parameters, "attention_factor", grown),
        short_factor=numbers(parameters, "short_factor", rope.rotary_dim // 2),
        long_factor=numbers(parameters, "long_factor", rope.rotary_dim // 2),
    )


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """Return YaRN's temperature: stated, or 0.1 m ln(factor) + 1; a ratio where `mscale` and its partner are set."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    default = temperature(1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):  # 0 means absent, as in the reference
        default = temperature(number(parameters, "mscale")) / temperature(number(parameters, "mscale_all_dim"))
    return number(parameters, "attention_factor", default)
