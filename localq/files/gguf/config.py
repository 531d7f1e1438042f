"""config.json of a .gguf model, from its metadata, by family (`names`). Torch-free and numpy-free.

What the metadata leaves out is as in llama.cpp, which knows it by architecture (src/models/).
"""

from __future__ import annotations

import math
from typing import Any

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.gguf import gemma4, mamba
from localq.files.gguf.facts import Facts
from localq.files.gguf.names import MIXTURES
from localq.files.gguf.rope import rope_scaling

MAX_LAYERS, MAX_EXPERTS = 256, 512  # as `model_folder.LIMITS`, checked before lists of this length are made
MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "lfm2moe": "lfm2_moe",
    "muse-glimmer": "muse_glimmer_text",
    "granitehybrid": "granitemoehybrid",
    "nemotron_h_moe": "nemotron_h",
    "qwen3moe": "qwen3_moe",
    "qwen3vl": "qwen3_vl_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
CONVOLVED = ("lfm2", "lfm2moe")
HYBRIDS = ("qwen35", "qwen35moe")
# The file has no key for gemma's query scale. As in llama.cpp, the layer count decides: the 27B models of both
# generations use hidden / heads, the others head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 4  # `expert_gating_func`
# Keys that would change the routing, and the values that do not.
_PLAIN_ROUTING = {"expert_weights_scale": (0, 1), "expert_group_count": (0, 1), "expert_shared_count": (0, 1)}


def family_of(facts: Facts) -> str:
    """The family of the model: its architecture, "mixtral" for a llama with experts.

    Raises LocalqError (exit 1) for experts in an architecture that is supported without them.
    """
    if not facts.get("expert_count", int):
        return facts.architecture
    family = "mixtral" if facts.architecture == "llama" else facts.architecture
    if family not in MIXTURES:
        why = f"{facts.architecture} models with experts are not supported in GGUF format"
        raise LocalqError(str(facts.container.path), why, "Use the model's safetensors files.", ExitCode.FAILURE)
    return family


def predicting_blocks(facts: Facts) -> int:
    """The blocks behind the last one that predict more tokens: `block_count` counts them too."""
    if facts.architecture not in (*HYBRIDS, *mamba.NEMOTRON) or not facts.get("nextn_predict_layers", int):
        return 0
    count = facts.integer("nextn_predict_layers")
    if count >= facts.integer("block_count"):
        raise facts.bad("nextn_predict_layers", f"has an invalid value: {count}")
    return count


def read_config(facts: Facts, family: str) -> dict[str, Any]:
    """The configuration, in the spelling of transformers. Raises LocalqError: exit 8, 1 for what is not supported."""
    heads, hidden = facts.integer("attention.head_count"), facts.integer("embedding_length")
    head_dim, layers = facts.integer("attention.key_length", hidden // heads), facts.integer("block_count")
    embedding = facts.container.tensors.get("token_embd.weight")
    if embedding is None:
        raise bad_file(str(facts.container.path), "token_embd.weight is missing", "Download the file again.")
    if layers > MAX_LAYERS:
        raise facts.bad("block_count", f"has an invalid value: {layers}")
    rotary = facts.integer("rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES.get(family, family),
        "hidden_size": hidden,
        "num_hidden_layers": layers - predicting_blocks(facts),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(facts, family, layers, heads),
        "head_dim": head_dim,
        "intermediate_size": _width(facts, family),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10_000.0),
        "rope_scaling": None if family == gemma4.ARCHITECTURE else rope_scaling(facts, rotary),
        "tie_word_embeddings": "output.weight" not in facts.container.tensors,
        "torch_dtype": "bfloat16",
    }
    if rotary != head_dim or family in HYBRIDS:  # where the key is absent, a quarter of the heads of hybrids turns
        fraction = rotary / head_dim
        # Readers compute int(factor * head_dim): int((30 / 44) * 44) is 29, one too few.
        exact = int(fraction * head_dim) == rotary
        config["partial_rotary_factor"] = fraction if exact else math.nextafter(fraction, 1.0)
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = facts.get(f"tokenizer.ggml.{name}_token_id", int)
    return {**config, **_of_family(facts, family, config)}


def _kv_heads(facts: Facts, family: str, layers: int, heads: int) -> int:
    """KV heads, where layers differ those of the first that has any."""
    if family in mamba.ARCHITECTURES:
        return mamba.largest(facts, "attention.head_count_kv", layers)
    if family == gemma4.ARCHITECTURE:
        return facts.integers("attention.head_count_kv", layers, heads)[0]
    if family in CONVOLVED:
        return max(_attention_heads(facts, layers))
    return facts.integer("attention.head_count_kv", heads)


def _attention_heads(facts: Facts, layers: int) -> list[int]:
    """KV heads of every layer; 0 for one with a short convolution."""
    found = facts.values.get(facts.full("attention.head_count_kv"))
    if not isinstance(found, list) or len(found) != layers or any(type(each) is not int or each < 0 for each in found):
        raise facts.bad("attention.head_count_kv", f"is not a list of {layers} head counts")
    if len({*found} - {0}) != 1:
        raise facts.bad("attention.head_count_kv", f"has an invalid value: {str(found)[:40]}")
    return found


def _convolved(facts: Facts, family: str, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    found: dict[str, Any] = {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if each else "conv" for each in _attention_heads(facts, layers)],
        "conv_L_cache": facts.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in facts.container.tensors),
    }
    if family == "lfm2":
        return {**found, "block_auto_adjust_ff_dim": False}
    return {
        **found,
        **_experts(facts, "num_experts", _SIGMOID),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "num_dense_layers": facts.get("leading_dense_block_count", int) or 0,
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in facts.container.tensors),
    }


def _width(facts: Facts, family: str) -> int:
    """Width of an MLP, where layers differ that of the first; of mixtures without one, that of an expert."""
    if family in mamba.NEMOTRON:
        return mamba.largest(facts, "feed_forward_length", facts.integer("block_count"))
    if family == gemma4.ARCHITECTURE:
        return facts.integers("feed_forward_length", facts.integer("block_count"))[0]
    if family in MIXTURES and facts.get("feed_forward_length", int) is None:
        return facts.integer("expert_feed_forward_length")
    return facts.integer("feed_forward_length")


def _of_family(facts: Facts, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of config.json beyond the common ones."""
    biased = "blk.0.attn_q.bias" in facts.container.tensors
    if family in ("gemma2", "gemma3"):
        return _gemma(facts, config)
    if family == gemma4.ARCHITECTURE:
        return gemma4.read_gemma4(facts, config)
    if family in HYBRIDS:
        return _hybrid(facts, config)
    if family in mamba.NEMOTRON:
        return mamba.read_nemotron(facts, config, facts.integer("block_count"))
    if family == mamba.GRANITE:
        return mamba.read_granite(facts, config)
    if family == "gpt-oss":
        return _gpt_oss(facts, config, biased)
    if family in CONVOLVED:
        return _convolved(facts, family, config)
    if family == "mistral3":
        return _mistral3(facts, config)
    if family == "muse-glimmer":
        return _muse_glimmer(facts, config)
    if family in ("exaone4", "olmo2"):
        return _post_norms(facts, config, biased)
    if family == "mixtral":
        return {"hidden_act": "silu", "sliding_window": None, **_experts(facts, "num_local_experts")}
    if family == "seed_oss":
        biases = {"attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
        stated = {key: f"blk.0.{part}.bias" in facts.container.tensors for key, part in biases.items()}
        return {"hidden_act": "silu", "attention_bias": biased, **stated}
    if family in ("granite", "llama", "smollm3"):
        mlp_biased = "blk.0.ffn_up.bias" in facts.container.tensors
        plain = {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": mlp_biased}
        if family == "granite":
            return {**plain, **_factors(facts, config)}
        # The file does not state which layers have no RoPE. As in llama.cpp: every fourth.
        return {**plain, "no_rope_layer_interval": 4} if family == "smollm3" else plain
    if family == "phi3":
        original = facts.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        window = facts.get("attention.sliding_window", int)
        return {"hidden_act": "silu", "sliding_window": window or None, "original_max_position_embeddings": original}
    plain = {"hidden_act": "silu", "use_sliding_window": False}
    if family == "qwen2":  # always has biases, and no key for them
        return plain
    return {**plain, "attention_bias": biased, **(_qwen3_moe(facts, config) if family == "qwen3moe" else {})}


def _gemma(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    large = layers == _GEMMA_27B_LAYERS[facts.architecture]
    gemma: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if large else config["head_dim"],
    }
    if facts.architecture == "gemma2":
        return {
            **gemma,
            "sliding_window": facts.integer("attention.sliding_window", 4096),
            "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        }
    caps = "gemma3.final_logit_softcapping" in facts.values
    gemma["final_logit_softcapping"] = facts.number("final_logit_softcapping") if caps else None
    if not facts.get("attention.sliding_window", int):
        return {**gemma, "layer_types": ["full_attention"] * layers}
    return {
        **gemma,
        "sliding_window": facts.integer("attention.sliding_window"),
        "sliding_window_pattern": facts.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
    }


def _experts(facts: Facts, key: str, gating: int = _SOFTMAX) -> dict[str, Any]:
    """Return the number of experts (`key`) and of those active per token. Raises for an unknown routing."""
    for name, values in _PLAIN_ROUTING.items():
        if (stated := facts.get(name, (int, float), 0)) not in values:
            raise _unsupported_error(facts, name, stated)
    if (stated := facts.get("expert_gating_func", int, 0)) not in (0, gating):
        raise _unsupported_error(facts, "expert_gating_func", stated)
    count = facts.integer("expert_count")
    if count > MAX_EXPERTS:
        raise facts.bad("expert_count", f"has an invalid value: {count}")
    return {key: count, "num_experts_per_tok": facts.integer("expert_used_count")}


def _qwen3_moe(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(facts, "num_experts")
    width = facts.integer("expert_feed_forward_length", config["intermediate_size"] // experts["num_experts_per_tok"])
    normed = facts.get("expert_weights_norm", bool, True)
    return {**experts, "moe_intermediate_size": width, "norm_topk_prob": normed}


def _hybrid(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    keys, values, inner = (facts.integer(f"ssm.{key}") for key in ("group_count", "time_step_rank", "inner_size"))
    if values % keys or inner % values:
        why = f"is {values}, but must be a multiple of ssm.group_count ({keys}) and divide ssm.inner_size ({inner})"
        raise facts.bad("ssm.time_step_rank", why)
    hybrid: dict[str, Any] = {
        "hidden_act": "silu",
        "full_attention_interval": facts.integer("full_attention_interval", 4),
        "linear_conv_kernel_dim": facts.integer("ssm.conv_kernel"),
        "linear_key_head_dim": facts.integer("ssm.state_size"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
    }
    recurrent = facts.values.get(facts.full("attention.recurrent_layers"))
    if isinstance(recurrent, list):
        layers = recurrent[: config["num_hidden_layers"]]
        hybrid["layer_types"] = ["linear_attention" if each else "full_attention" for each in layers]
    if facts.architecture == "qwen35":
        return hybrid
    width = facts.integer("expert_feed_forward_length")
    shared = facts.integer("expert_shared_feed_forward_length", width)
    experts = _experts(facts, "num_experts")
    return {**hybrid, **experts, "moe_intermediate_size": width, "shared_expert_intermediate_size": shared}


def _gpt_oss(facts: Facts, config: dict[str, Any], biased: bool) -> dict[str, Any]:
    pattern = facts.integer("attention.sliding_window_pattern", 2)
    windowed = (layer % pattern < pattern - 1 for layer in range(config["num_hidden_layers"]))
    # All published models state `truncate`: false, for which there is no key. Without scaling, their default is YaRN.
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    return {
        **_experts(facts, "num_local_experts", _SOFTMAX_OF_CHOSEN),
        "hidden_act": "silu",
        "attention_bias": biased,
        "intermediate_size": facts.integer("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "rope_scaling": {**scaling, "truncate": False} if scaling["rope_type"] == "yarn" else scaling,
    }


def _mistral3(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """Of a ministral3, or of a mistral without `attention.temperature_scale`; Mistral 3 wraps both."""
    plain = {"hidden_act": "silu", "sliding_window": None}
    if not facts.get("attention.temperature_scale", (int, float)):
        return {**plain, "model_type": "mistral"}
    scaling = dict(config["rope_scaling"] or {"rope_type": "default"})
    context = config["max_position_embeddings"]
    original = scaling.setdefault(
        "original_max_position_embeddings", facts.integer("rope.scaling.original_context_length", context)
    )
    length = facts.get("attention.temperature_length", int) or original
    if length != original:
        raise _unsupported_error(facts, "attention.temperature_length", length)
    scaling["llama_4_scaling_beta"] = facts.number("attention.temperature_scale")
    return {**plain, "model_type": "ministral3", "rope_scaling": scaling}


def _factors(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """The constants of a Granite. Where none is stated for attention, it is scaled as usual."""
    return {
        "attention_multiplier": facts.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def _layer_types(facts: Facts, layers: int) -> list[str]:
    """Return the type of each layer: windowed as stated, else all but every n-th, by default every fourth."""
    pattern = facts.values.get(facts.full("attention.sliding_window_pattern"))
    if not isinstance(pattern, list):
        period = facts.integer("attention.sliding_window_pattern", 4)
        pattern = [layer % period < period - 1 for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in pattern]


def _post_norms(facts: Facts, config: dict[str, Any], biased: bool) -> dict[str, Any]:
    """Of an EXAONE 4 or an OLMo 3, or without windows of an OLMo 2."""
    layers, window = config["num_hidden_layers"], facts.get("attention.sliding_window", int)
    plain = {"hidden_act": "silu", "attention_bias": biased}
    if config["model_type"] == "olmo2":
        if not window:
            return plain
        plain["model_type"] = "olmo3"
    kinds = _layer_types(facts, layers) if window else ["full_attention"] * layers
    return {**plain, "sliding_window": window or None, "layer_types": kinds}


def _muse_glimmer(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp's converter makes norms of queries and keys, which the model has without weights, for the factor.
    if (keys := _constant(facts, "attn_k_norm.weight", config)) != 1:
        raise _unsupported_error(facts, "attn_k_norm.weight", keys)
    return {
        "hidden_activation": "silu",
        "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": _layer_types(facts, config["num_hidden_layers"]),
        "final_logit_softcapping": facts.number("final_logit_softcapping"),
        "output_multiplier": facts.number("logit_scale"),
        "qk_scale_factor": _constant(facts, "attn_q_norm.weight", config),
    }


def _constant(facts: Facts, part: str, config: dict[str, Any]) -> float:
    """The one value that a norm holds in all blocks. Raises LocalqError (exit 1) if it is not the same everywhere."""
    found: set[float] = set()
    for block in range(config["num_hidden_layers"]):
        name = f"blk.{block}.{part}"
        tensor = facts.container.tensors.get(name)
        if tensor is None:
            raise bad_file(str(facts.container.path), f"{name} is missing", "Download the file again.")
        found.update(facts.floats(name, tensor, config["head_dim"]))
    if len(found) > 1:
        raise _unsupported_error(facts, part, sorted(found))
    return found.pop()


def _unsupported_error(facts: Facts, key: str, value: object) -> LocalqError:
    why = f"unsupported value for {facts.full(key)}: {str(value)[:40]}"
    return LocalqError(str(facts.container.path), why, "Use a different GGUF file for this model.", ExitCode.FAILURE)
