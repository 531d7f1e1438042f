"""Tiny random models in the shape of entries of the catalogue: what sets an entry apart is kept, sizes are shrunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from localq.files import format_facts, schemes
from localq.files.architecture import Architecture
from localq.files.model_folder import open_model
from localq.files.model_types import WRAPPERS
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.files.tiny_gguf_models import write_with_tokenizer
from tests.support.formats import (
    aqlm_checkpoints,
    expert_checkpoints,
    fp8_checkpoints,
    hybrid_checkpoints,
    int4_checkpoints,
    vptq_checkpoints,
    vq2_checkpoints,
)
from tests.support.formats.int4_checkpoints import Int4
from tests.support.models.tiny_case import MUSE_TOWER, PIXTRAL, QWEN_TOWER, VISION
from tests.support.models.tiny_cases import GEMMA4_TOWERS
from tests.support.models.tiny_checkpoints import make_checkpoint

HEAD, HEADS, WIDTH, EXPERT, WINDOW = 32, 4, 256, 64, 16


def shrunk(arch: Architecture) -> Architecture:
    """The same facts of a small model: rows of whole blocks of every format, windows shorter than the text."""
    kv_heads = {arch.heads: HEADS, 1: 1}.get(arch.kv_heads, HEADS // 2)
    head_dim = HEAD if arch.heads * arch.head_dim == arch.hidden else 2 * HEAD  # then the width is another
    layers = 6 if arch.model_type.startswith("gemma3") else 2  # one of six is not windowed
    layers = 4 if arch.model_type in ("exaone4", "olmo3") else layers  # one of four
    all_windowed = arch.window_layers == arch.layers
    windowed = layers if all_windowed else layers // 2 if arch.model_type in ("gemma2", "gpt_oss") else layers - 1
    small = replace(
        arch,
        layers=layers,
        hidden=HEADS * HEAD,
        heads=HEADS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=WIDTH if arch.intermediate else 0,
        vocab=320,
        max_context=512,
        window=WINDOW if arch.window else 0,
        window_layers=windowed if arch.window else 0,
        experts=min(arch.experts, 5),
        experts_active=min(arch.experts_active, 3),
        expert_intermediate=EXPERT if arch.experts else 0,
    )
    for shrink in (_shrunk_hybrid, _shrunk_two_sizes, _shrunk_one_part, _shrunk_head_gates, _shrunk_latents):
        small = replace(small, **shrink(arch))
    return small


def _shrunk_head_gates(arch: Architecture) -> dict[str, int]:
    """Three layers, of which the first has no window and fewer heads."""
    if not arch.traits.head_gates:
        return {}
    return {
        "layers": 3,
        "window_layers": 2,
        "window_heads": 6,
        "rotary": HEAD,
        "shared_intermediate": 3 * EXPERT,
        "dense_layers": 1,
    }


def _shrunk_latents(arch: Architecture) -> dict[str, int]:
    """Three layers, of which the first is dense; a quarter of a head turns."""
    if not arch.traits.latents:
        return {}
    return {
        "layers": 3,
        "rotary": HEAD // 2,
        "kv_latent": 96,
        "query_latent": 64 if arch.query_latent else 0,
        "value_dim": HEAD,
        "shared_intermediate": 3 * EXPERT,
        "dense_layers": 1,
    }


def _shrunk_one_part(arch: Architecture) -> dict[str, int]:
    """Two of each part that the model has; as many heads share a group as in the model."""
    if not arch.traits.one_part:
        return {}
    kinds = (arch.recurrent_layers, arch.attention_layers, arch.expert_layers, arch.dense_layers)
    return {
        "layers": 2 * sum(map(bool, kinds)),
        "attention_layers": 2 if arch.attention_layers else 0,
        "dense_layers": 2 if arch.dense_layers else 0,
    }


def _shrunk_two_sizes(arch: Architecture) -> dict[str, int]:
    """Six layers, two of them without a window, whose heads are wider; of those that share keys, the last three."""
    if not arch.traits.two_head_sizes:
        return {}
    return {
        "layers": 6,
        "window_layers": 4,
        "head_dim": HEAD,
        "global_head_dim": 2 * HEAD,
        "global_kv_heads": 1 if arch.global_kv_heads else 0,
        "kv_heads": HEADS // 2,
        "shared_layers": 3 if arch.shared_layers else 0,
        "input_width": EXPERT if arch.input_width else 0,
        "input_vocab": 320 if arch.input_width else 0,
    }


def _shrunk_hybrid(arch: Architecture) -> dict[str, int]:
    """Four layers, one of attention; as many value heads share a key head as in the model."""
    if arch.conv_kernel:
        return {"layers": 3, "recurrent_layers": 2, "dense_layers": 1 if arch.experts else 0}
    if not arch.recurrent_layers:
        return {}
    if arch.traits.mamba:
        own = {} if arch.traits.one_part else {"layers": 3, "head_dim": HEAD}
        return {
            **own,
            "recurrent_layers": 2,
            "shared_intermediate": 3 * EXPERT if arch.shared_intermediate else 0,
            "delta_key_heads": min(arch.delta_key_heads, 2),
            "delta_value_heads": 4,
            "delta_key_dim": 16,
            "delta_value_dim": HEAD,
        }
    return {
        "layers": 4,
        "recurrent_layers": 3,
        "head_dim": 2 * HEAD,
        "rotary": HEAD // 2,
        "shared_intermediate": 3 * EXPERT if arch.shared_intermediate else 0,
        "delta_key_heads": 2,
        "delta_value_heads": 2 * arch.delta_value_heads // arch.delta_key_heads,
        "delta_key_dim": 16,
        "delta_value_dim": HEAD,
    }


def config_of(arch: Architecture) -> dict[str, Any]:
    """What a configuration of transformers must say for a model of these facts."""
    fields: dict[str, Any] = {
        "vocab_size": arch.vocab,
        "hidden_size": arch.hidden,
        "intermediate_size": arch.intermediate or arch.expert_intermediate,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": None if arch.model_type == "phi3" else arch.head_dim,  # it has none of its own
        "max_position_embeddings": arch.max_context,
        "tie_word_embeddings": arch.tied,
        "sliding_window": arch.window or None,
    }
    if arch.model_type in ("llama", "qwen3", "qwen3_moe"):
        fields["attention_bias"] = arch.output_bias
    if arch.model_type == "llama":
        fields["mlp_bias"] = arch.mlp_bias
    if arch.experts:
        fields |= {"num_local_experts": arch.experts, "num_experts_per_tok": arch.experts_active}
    if arch.model_type == "qwen3_moe":
        fields |= {
            "num_experts": arch.experts,
            "moe_intermediate_size": arch.expert_intermediate,
            "norm_topk_prob": True,
        }
        fields["mlp_only_layers"] = []
        del fields["num_local_experts"]
    if arch.traits.hybrid:
        return _hybrid(arch, fields)
    if arch.traits.short_convolution:
        return _convolved(arch, fields)
    if arch.traits.two_head_sizes:
        return _two_sizes(arch, fields)
    if arch.model_type == "exaone4":
        windowed = (bool(each and each.window) for each in arch.attentions)
        fields["layer_types"] = ["sliding_attention" if each else "full_attention" for each in windowed]
    if arch.traits.head_gates:
        return _head_gates(arch, fields)
    if arch.traits.latents:
        return _latents(arch, fields)
    if arch.traits.one_part:
        return _one_part(arch, fields)
    if arch.traits.multipliers:
        return _shared_mlp(arch, fields)
    if arch.model_type == "ministral3":
        period = arch.max_context // 16
        fields["rope_parameters"] = {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": period,
            "llama_4_scaling_beta": 0.1,
        }  # fmt: skip
    if arch.model_type == "gemma3":
        text = {**fields, "model_type": "gemma3_text", "query_pre_attn_scalar": 32}
        return {
            "text_config": text,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": arch.tied,
        }
    return fields


def _convolved(arch: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Of an LFM2: the last layer has attention."""
    given = {key: value for key, value in fields.items() if key not in ("num_local_experts", "sliding_window")}
    kinds = ["conv"] * arch.recurrent_layers + ["full_attention"] * (arch.layers - arch.recurrent_layers)
    given |= {"layer_types": kinds, "conv_L_cache": arch.conv_kernel}
    if not arch.experts:
        return {**given, "block_auto_adjust_ff_dim": False}
    return {
        **given,
        "num_experts": arch.experts,
        "moe_intermediate_size": arch.expert_intermediate,
        "num_dense_layers": arch.dense_layers,
    }


def _two_sizes(arch: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a Gemma 4; a tiny model has no scores that attention could not tell apart."""
    given = {key: value for key, value in fields.items() if key not in ("num_local_experts", "num_experts_per_tok")}
    return {
        **given,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        "global_head_dim": arch.global_head_dim,
        "num_global_key_value_heads": arch.global_kv_heads or arch.kv_heads,
        "attention_k_eq_v": arch.keys_as_values,
        "num_kv_shared_layers": arch.shared_layers,
        "use_double_wide_mlp": arch.wide_shared_layers,
        "hidden_size_per_layer_input": arch.input_width,
        "vocab_size_per_layer_input": arch.input_vocab or arch.vocab,
        "enable_moe_block": bool(arch.experts),
        "num_experts": arch.experts or None,
        "top_k_experts": arch.experts_active or None,
        "moe_intermediate_size": arch.expert_intermediate or None,
    }


def _one_part(arch: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Of layers with one part each; steps without the lower limit that transformers has for passes of many tokens."""
    given = {key: value for key, value in fields.items() if key not in ("num_local_experts", "num_hidden_layers")}
    names = {"mamba": "linear_attention", "attention": "full_attention", "experts": "moe", "mlp": "mlp"}
    return {
        **given,
        "layers_block_type": [names[part] for part in arch.layer_parts],
        "mamba_num_heads": arch.delta_value_heads,
        "mamba_head_dim": arch.delta_value_dim,
        "n_groups": arch.delta_key_heads,
        "ssm_state_size": arch.delta_key_dim,
        "conv_kernel": arch.delta_kernel,
        "time_step_min": 1e-30,
        "n_routed_experts": arch.experts,
        "moe_intermediate_size": arch.expert_intermediate,
        "moe_shared_expert_intermediate_size": arch.shared_intermediate,
    }


def _head_gates(arch: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a Laguna: the first layer has no window, and a dense MLP."""
    given = {key: value for key, value in fields.items() if key != "num_local_experts"}
    turning = arch.rotary / arch.head_dim
    return {
        **given,
        "layer_types": ["full_attention"] + ["sliding_attention"] * (arch.layers - 1),
        "num_attention_heads_per_layer": [arch.heads] + [arch.window_heads] * (arch.layers - 1),
        "num_experts": arch.experts,
        "moe_intermediate_size": arch.expert_intermediate,
        "shared_expert_intermediate_size": arch.shared_intermediate,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": turning},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    }  # fmt: skip


def _latents(arch: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a GLM-4.7-Flash."""
    given = {key: value for key, value in fields.items() if key not in ("head_dim", "num_local_experts")}
    return {
        **given,
        "qk_nope_head_dim": arch.head_dim - arch.rotary,
        "qk_rope_head_dim": arch.rotary,
        "v_head_dim": arch.value_dim,
        "kv_lora_rank": arch.kv_latent,
        "q_lora_rank": arch.query_latent or None,
        "n_routed_experts": arch.experts,
        "moe_intermediate_size": arch.expert_intermediate,
        "n_shared_experts": arch.shared_intermediate // arch.expert_intermediate,
    }


def _shared_mlp(arch: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a Granite 4.0."""
    given = {key: value for key, value in fields.items() if key not in ("head_dim", "sliding_window")}
    kinds = ("linear_attention" if each is None else "full_attention" for each in arch.attentions)
    return {
        **given,
        "layer_types": list(kinds),
        "intermediate_size": arch.expert_intermediate or arch.intermediate,
        "shared_intermediate_size": arch.shared_intermediate or arch.intermediate,
        "num_local_experts": arch.experts,
        "mamba_n_heads": arch.delta_value_heads,
        "mamba_d_head": arch.delta_value_dim,
        "mamba_n_groups": arch.delta_key_heads,
        "mamba_d_state": arch.delta_key_dim,
        "mamba_expand": arch.delta_columns // arch.hidden,
    }


def _hybrid(arch: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Of the text model alone: transformers writes no wrapper around it."""
    changed = {
        "linear_num_key_heads": arch.delta_key_heads,
        "linear_num_value_heads": arch.delta_value_heads,
        "linear_key_head_dim": arch.delta_key_dim,
        "linear_value_head_dim": arch.delta_value_dim,
        "linear_conv_kernel_dim": arch.delta_kernel,
        "full_attention_interval": 4,
        "layer_types": None,
        "sliding_window": None,
        "num_local_experts": None,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": arch.rotary / arch.head_dim,
        },
    }  # fmt: skip
    if arch.experts:
        changed |= {
            "num_experts": arch.experts,
            "moe_intermediate_size": arch.expert_intermediate,
            "shared_expert_intermediate_size": arch.shared_intermediate,
        }
    return {**fields, **changed}


def published(arch: Architecture) -> tuple[str, dict[str, Any]]:
    """The model type of published files of these facts, and `config_of` in the form of their configuration."""
    fields = config_of(arch)
    towers = {
        "mistral3": {"vision_config": PIXTRAL},
        "muse_glimmer": MUSE_TOWER,
        "qwen3_vl": QWEN_TOWER,
        **GEMMA4_TOWERS,
    }
    for wrapper, tower in towers.items():
        if arch.model_type in WRAPPERS[wrapper] and arch.model_type != "mistral":  # of which most files are flat
            text = {**fields, "model_type": arch.model_type}
            return wrapper, {"text_config": text, "tie_word_embeddings": arch.tied, **tower}
    return arch.model_type, fields


def write(folder: Path, arch: Architecture, format: str, scheme: str) -> Path | None:
    """A model of these (shrunk) facts in `format`; None where no tiny writer has that format for this shape."""
    if format == "gguf":
        folder.mkdir(parents=True)
        return write_with_tokenizer(folder / "model.gguf", "Q4_1" if scheme.startswith(schemes.MIX) else scheme)
    if arch.traits.hybrid:
        return _write_hybrid(folder, arch, format, scheme, config_of(arch))
    if format in ("bf16", "fp8", *format_facts.formats_by_tensor()) or arch.experts:
        model_type, fields = published(arch)
        plain = make_checkpoint(folder / "plain", model_type, shard_bytes=2**30, initializer_range=0.15, **fields)
        made = plain if format == "bf16" else _made_of(plain, folder, format, scheme)
    elif arch.model_type in (
        "gemma3",
        "gemma4_text",
        "gemma4_unified_text",
        "muse_glimmer_text",
        "qwen3_vl_text",
    ):  # writers below would take Linears of the vision tower too
        return None
    else:
        made = folder / "made"
        _WRITERS[format](made, scheme, model_type=arch.model_type, **config_of(arch))
    return _without_window(made) if not arch.window else made


def _write_hybrid(folder: Path, arch: Architecture, format: str, scheme: str, fields: dict[str, Any]) -> Path | None:
    """In the wrapper around the text model; None for a format that only other writers have."""
    if format not in ("bf16", "fp8", "vq2", *format_facts.formats_by_tensor()):
        return None
    model_type, text = f"{arch.model_type}_text", folder / "text"
    if format == "vq2" and not arch.experts:
        plain = ("lm_head", "in_proj_a", "in_proj_b")
        vq2_checkpoints.write(text, scheme or "s4l16", model_type, plain=plain, **fields)
    else:
        make_checkpoint(text, model_type, shard_bytes=2**30, initializer_range=0.15, **fields)
    if format == "fp8":
        fp8_checkpoints.rewrite(text)
    elif format == "vq2" and arch.experts:
        text = expert_checkpoints.quantized(folder, text, f"vq2 {scheme or 's4l16'}")[0]
    made = hybrid_checkpoints.wrapped(folder / "wrapped", text, hybrid_checkpoints.PREFIXES[0])
    if format in format_facts.formats_by_tensor():
        return by_tensor.convert(TensorwiseRequest(open_model(made), format, folder / "made"))
    return made


def _made_of(plain: Path, folder: Path, format: str, scheme: str) -> Path:
    if json.loads((plain / "config.json").read_text())["model_type"] == "gpt_oss":  # all else is made of what it has
        plain = expert_checkpoints.gpt_oss_published(folder / "published", plain)
        if format == "mxfp4":
            return plain
    if format == "fp8":
        of_mistral = json.loads((plain / "config.json").read_text())["model_type"] == "mistral3"
        fp8_checkpoints.rewrite(plain, None if of_mistral else (128, 128), activations=of_mistral)
        return plain
    if format in format_facts.formats_by_tensor():
        return by_tensor.convert(TensorwiseRequest(open_model(plain), format, folder / "made"))
    scheme = scheme or ("s4l16" if format == "vq2" else "")
    return expert_checkpoints.quantized(folder, plain, f"{format} {scheme}")[0]


def _without_window(folder: Path) -> Path:
    """transformers' class of mistral has a window where it is told of none."""
    stated = json.loads((folder / "config.json").read_text())
    if "text_config" not in stated:
        (folder / "config.json").write_text(json.dumps({**stated, "sliding_window": None}))
    return folder


Writer = Callable[..., object]  # folder, scheme, model_type=, and fields of the configuration
_WRITERS: dict[str, Writer] = {
    "aqlm": lambda folder, scheme, **fields: aqlm_checkpoints.write(folder, aqlm_checkpoints.LAYOUTS[scheme], **fields),
    "vptq": lambda folder, scheme, **fields: vptq_checkpoints.write(
        folder, [vptq_checkpoints.SCHEMES[scheme]], **fields
    ),
    "vq2": lambda folder, scheme, **fields: vq2_checkpoints.write(folder, scheme or "s4l16", **fields),
    "awq": lambda folder, scheme, **fields: int4_checkpoints.write(folder, Int4("awq", int(scheme[1:])), **fields),
    "gptq": lambda folder, scheme, **fields: int4_checkpoints.write(folder, Int4("gptq", int(scheme[1:])), **fields),
}
