"""The fields of `architecture.Architecture` from the text part of a config.json. Torch-free."""

from __future__ import annotations

from typing import Any

from localq.errors import bad_file
from localq.files import parallel_blocks, short_convolutions
from localq.files.attention_shapes import global_heads, heads_by_window, sources
from localq.files.context_length import longest_context
from localq.files.layer_parts import ATTENTION, EXPERTS, MAMBA, MLP, layer_parts
from localq.files.layer_patterns import dense_layers, recurrent_layers, routed_experts, sparse_layers
from localq.files.mamba_layers import is_turning, mamba_columns, mamba_layers
from localq.files.model_types import MODEL_TYPES, Traits, windows

# Of a Mamba-2: groups, heads, columns of a head and of the state, and tokens that its convolution sees.
MAMBA_KEYS = ("n_groups", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel")
GRANITE_KEYS = ("mamba_n_groups", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv")

OUT_BIAS = "attention_out_bias"  # of families that state this bias by itself


def fields_of(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """The fields from the text part of config.json, with the defaults of its model type.

    Raises KeyError for a key that is missing, and LocalqError (exit 8) for values that no model can have.
    """
    traits = MODEL_TYPES[model_type]
    if traits.one_part:
        return _one_part(model_type, text)
    text = _complete(traits, text)
    layers, heads, hidden = text["num_hidden_layers"], text["num_attention_heads"], text["hidden_size"]
    counts = (text[name] for name in ("num_local_experts", "num_experts") if text.get(name) is not None)
    experts = next(counts, traits.experts) if traits.experts else 0
    dense = dense_layers(text, layers) if experts and traits.own_expert_width else 0
    experts = 0 if dense == layers else experts
    active = _first(text, "num_experts_per_tok", "experts_per_token") or 0
    # gpt-oss and mixtral call the width of an expert intermediate_size; qwen3_moe has both.
    named = "moe_intermediate_size" if traits.own_expert_width else "intermediate_size"
    expert_width = text.get(named) or text["intermediate_size"]
    attention_bias = bool(text.get("attention_bias", False))
    window, windowed = windows(model_type, text, layers)
    fields: dict[str, Any] = {
        "model_type": model_type,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or hidden // heads,
        "intermediate": 0 if experts and not dense else text["intermediate_size"],
        "vocab": text["vocab_size"],
        "tied": bool(text.get("tie_word_embeddings", False)),
        "max_context": longest_context({**text, "model_type": model_type}),
        "window": window,
        "window_layers": sum(windowed),
        "windowed": windowed,
        "experts": experts,
        "experts_active": active if experts else 0,
        "expert_intermediate": expert_width if experts else 0,
        "dense_layers": dense if experts else 0,
        "shared_intermediate": (text.get("shared_expert_intermediate_size") or 0) if experts and traits.hybrid else 0,
        "rotary": _rotary(text) if traits.partial_rotary else 0,
        **_recurrence(traits, text, layers),
        "selection_bias": bool(experts and traits.sigmoid_router and text.get("use_expert_bias", True)),
        "qkv_bias": attention_bias or traits.qkv_bias,
        "output_bias": bool(text[OUT_BIAS]) if OUT_BIAS in traits.defaults else attention_bias,
        "mtp": traits.hybrid and bool(text.get("mtp_num_hidden_layers")),
        "mlp_bias": bool(text.get("mlp_bias", False)) or traits.mlp_bias,
    }
    return fields | _own_fields(traits, text, windowed or (False,) * layers, bool(experts))


def _own_fields(traits: Traits, text: dict[str, Any], windowed: tuple[bool, ...], has_experts: bool) -> dict[str, Any]:
    """The fields that families have in ways of their own."""
    if traits.head_gates:
        return _head_gates(text, windowed)
    if traits.latents:
        return _latents(text)
    if traits.parallel:
        return _parallel(text)
    if traits.multipliers:
        return _shared_mlp(text, len(windowed), has_experts)
    return _two_head_sizes(text, windowed) if traits.two_head_sizes else {}


def _complete(traits: Traits, text: dict[str, Any]) -> dict[str, Any]:
    """`text` in the names of other families, with what follows from its other keys."""
    if traits.short_convolution:
        return short_convolutions.complete(text)
    return parallel_blocks.complete(text) if traits.parallel else text


def _recurrence(traits: Traits, text: dict[str, Any], layers: int) -> dict[str, Any]:
    """The fields of gated delta nets and short convolutions; 0 where there are none."""
    recurrent = recurrent_layers(text, layers) if traits.hybrid or traits.short_convolution else ()
    delta = text if any(recurrent) and traits.hybrid else {}
    convolved = any(recurrent) and traits.short_convolution
    return {
        "recurrent_layers": sum(recurrent),
        "recurrent": recurrent,
        "delta_key_heads": delta.get("linear_num_key_heads", 0),
        "delta_value_heads": delta.get("linear_num_value_heads", 0),
        "delta_key_dim": delta.get("linear_key_head_dim", 0),
        "delta_value_dim": delta.get("linear_value_head_dim", 0),
        "delta_kernel": delta.get("linear_conv_kernel_dim", 0),
        "conv_kernel": text["conv_L_cache"] if convolved else 0,
        "conv_bias": bool(text["conv_bias"]) if convolved else False,
    }


def _head_gates(text: dict[str, Any], windowed: tuple[bool, ...]) -> dict[str, Any]:
    """The fields of a Laguna (`Traits.head_gates`)."""
    whole, others = heads_by_window(text, windowed)
    sparse = sum(sparse_layers(text, len(windowed)))
    ropes = text.get("rope_parameters")
    own = ropes.get("full_attention") if isinstance(ropes, dict) else None
    return {
        "heads": whole or others,
        "window_heads": others if whole and others != whole else 0,
        "intermediate": text["intermediate_size"] if sparse < len(windowed) else 0,
        "dense_layers": len(windowed) - sparse if sparse else 0,
        "experts": text["num_experts"] if sparse else 0,
        "experts_active": text["num_experts_per_tok"] if sparse else 0,
        "expert_intermediate": text["moe_intermediate_size"] if sparse else 0,
        "shared_intermediate": text["shared_expert_intermediate_size"] if sparse else 0,
        "rotary": _rotary({"partial_rotary_factor": 0.5, **(own or {}), "head_dim": text["head_dim"]}),
    }


def _latents(text: dict[str, Any]) -> dict[str, Any]:
    """The fields of a GLM-4.7-Flash (`Traits.latents`)."""
    heads, layers, rotary = text["num_attention_heads"], text["num_hidden_layers"], text["qk_rope_head_dim"]
    sparse, width = sum(sparse_layers(text, layers)), text["moe_intermediate_size"]
    return {
        "kv_heads": heads,
        "head_dim": text["qk_nope_head_dim"] + rotary,
        "rotary": rotary,
        "kv_latent": text["kv_lora_rank"],
        "query_latent": text.get("q_lora_rank") or 0,
        "value_dim": text["v_head_dim"],
        "intermediate": text["intermediate_size"] if sparse < layers else 0,
        "dense_layers": layers - sparse if sparse else 0,
        "experts": routed_experts(text) if sparse else 0,
        "experts_active": text["num_experts_per_tok"] if sparse else 0,
        "expert_intermediate": width if sparse else 0,
        "shared_intermediate": text["n_shared_experts"] * width if sparse else 0,
        "selection_bias": sparse > 0,
        "mlp_bias": False,
    }


def _parallel(text: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Cohere2 with experts (`Traits.parallel`)."""
    dense_width, shared_width = parallel_blocks.mlp_widths(text)
    sparse, layers = len(parallel_blocks.sparse_of(text)), text["num_hidden_layers"]
    return {
        "intermediate": dense_width if sparse < layers else 0,
        "dense_layers": layers - sparse if sparse else 0,
        "experts": text["num_experts"] if sparse else 0,
        "experts_active": text["num_experts_per_tok"] if sparse else 0,
        "expert_intermediate": text["intermediate_size"] if sparse else 0,
        "shared_intermediate": shared_width if sparse else 0,
        "unrotated": not any(parallel_blocks.turning_layers(text)),
    }


def _shared_mlp(text: dict[str, Any], layers: int, has_experts: bool) -> dict[str, Any]:
    """The fields of a Granite 4.0 (`Traits.multipliers`)."""
    width, recurrent = text["shared_intermediate_size"], mamba_layers(text, layers)
    return {
        "intermediate": 0 if has_experts else width,
        "shared_intermediate": width if has_experts else 0,
        "unrotated": not is_turning(text),
        "recurrent": recurrent,
        **_mamba(sum(recurrent), {**text, "mamba_d_head": mamba_columns(text)}, GRANITE_KEYS),
    }


def _one_part(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model whose layers have one part each (`Traits.one_part`)."""
    parts = layer_parts(text)
    heads, experts = text["num_attention_heads"], text["n_routed_experts"] if EXPERTS in parts else 0
    return {
        "model_type": model_type,
        "layers": len(parts),
        "hidden": text["hidden_size"],
        "heads": heads,
        "kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text["head_dim"],
        "intermediate": text["intermediate_size"] if MLP in parts else 0,
        "vocab": text["vocab_size"],
        "tied": bool(text.get("tie_word_embeddings", False)),
        "max_context": text["max_position_embeddings"],
        "experts": experts,
        "experts_active": text["num_experts_per_tok"] if experts else 0,
        "expert_intermediate": text["moe_intermediate_size"] if experts else 0,
        "shared_intermediate": text["moe_shared_expert_intermediate_size"] if experts else 0,
        "selection_bias": bool(experts),
        "dense_layers": parts.count(MLP),
        "attention_layers": parts.count(ATTENTION),
        "unrotated": True,
        "parts": parts,
        **_mamba(parts.count(MAMBA), text, MAMBA_KEYS),
    }


def _mamba(count: int, text: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `count` layers with a Mamba-2; `keys` as `MAMBA_KEYS`."""
    groups, heads, columns, state, kernel = (text[key] if count else 0 for key in keys)
    return {
        "recurrent_layers": count,
        "delta_key_heads": groups,
        "delta_value_heads": heads,
        "delta_key_dim": state,
        "delta_value_dim": columns,
        "delta_kernel": kernel,
    }


def _two_head_sizes(text: dict[str, Any], windowed: tuple[bool, ...]) -> dict[str, Any]:
    """The fields of layers that differ in their heads (`Traits.two_head_sizes`)."""
    kv_heads, head_dim = global_heads(text, windowed)
    shared = text.get("num_kv_shared_layers") or 0
    if type(shared) is not int or not 0 <= shared < len(windowed):
        why = f"num_kv_shared_layers has an invalid value: {str(shared)[:40]}"
        raise bad_file("config.json", why, "Download the model again.")
    sources(windowed, shared)
    experts = text["num_experts"] if text.get("enable_moe_block") else 0
    return {
        "global_kv_heads": 0 if kv_heads == text["num_key_value_heads"] else kv_heads,
        "global_head_dim": 0 if head_dim == text["head_dim"] else head_dim,
        "keys_as_values": bool(text.get("attention_k_eq_v")),
        "shared_layers": shared,
        "wide_shared_layers": bool(text.get("use_double_wide_mlp") and shared),
        "experts": experts,
        "experts_active": text["top_k_experts"] if experts else 0,
        "expert_intermediate": text["moe_intermediate_size"] if experts else 0,
        "input_width": (width := text.get("hidden_size_per_layer_input") or 0),
        "input_vocab": text["vocab_size_per_layer_input"] if width else 0,
    }


def _rotary(text: dict[str, Any]) -> int:
    entry = text.get("rope_parameters") or text.get("rope_scaling")
    stated = entry.get("partial_rotary_factor") if isinstance(entry, dict) else None
    factor = text.get("partial_rotary_factor") if stated is None else stated
    return int(text["head_dim"] * factor) if isinstance(factor, float) and 0 < factor < 1 else 0


def _first(fields: dict[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if name in fields), None)


def checked(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields`. Raises LocalqError (exit 8) for inconsistent numbers."""
    heads, kv_heads, head_dim = fields["heads"], fields["kv_heads"], fields["head_dim"]
    groups, of_groups = fields["delta_key_heads"], fields["delta_value_heads"]
    why = ""
    if head_dim < 1 or heads % kv_heads:
        why = f"{heads} heads, {kv_heads} KV heads and {fields['hidden']} columns are inconsistent"
    elif groups and of_groups % groups and MODEL_TYPES[fields["model_type"]].mamba:
        why = f"the number of Mamba heads ({of_groups}) is not a multiple of the number of groups ({groups})"
    elif groups and of_groups % groups:
        why = f"linear_num_value_heads ({of_groups}) is not a multiple of linear_num_key_heads ({groups})"
    elif fields["experts_active"] > fields["experts"]:
        stated = f"{fields['experts_active']} experts per token are requested"
        why = f"{stated}, but the model has only {fields['experts']}"
    if why:
        raise bad_file("config.json", why, "Download the model again.")
    return fields
