"""Random weights of any architecture, as a checkpoint that the loader reads: no download, and no second way to load.

Big tensors are made on the device, one at a time, each from a seed of its own, so that a 70B takes the memory of its
codes and no more. Their scale keeps the residual stream of a hundred layers far from the limits of 16 bit: every
row of a matrix has about unit gain. Tokens mean nothing; the time they take does not depend on the values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localq import gpus
from localq.bench.synthetic import experts as random_experts
from localq.bench.synthetic import formats as random_formats
from localq.bench.synthetic.tensors import RandomTensors, TensorSpec, filled, normal, on_host, tensor_spec
from localq.errors import usage_error
from localq.files import catalog, format_facts, layer_parts
from localq.files.architecture import Architecture
from localq.files.layer_caches import RecurrentState
from localq.files.model_folder import ModelFiles
from localq.files.model_types import text_part
from localq.formats import FORMATS
from localq.formats.checkpoint import Checkpoint
from localq.models import architecture
from localq.models.decoder import Decoder
from localq.models.layers import RMSNorm

DEFAULT = "nf4"
HEAD, TABLE, INPUT_TABLE = "lm_head.weight", "embed_tokens.weight", "embed_tokens_per_layer.weight"
FACTORS = (".layer_scalar", ".router.scale", ".router.per_expert_scale")  # multiply what others compute


def config_of(arch: Architecture, dtype: str = "float16") -> dict[str, Any]:
    """A config.json of that shape; what the catalogue does not know (rope, eps, soft caps) is the family's usual."""
    wrapped = arch.model_type == "gemma3" or (arch.traits.hybrid and not arch.model_type.endswith("_text"))
    family = f"{arch.model_type}_text" if wrapped else arch.model_type
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate or arch.expert_intermediate,
        "vocab_size": arch.vocab,
        "tie_word_embeddings": arch.tied,
        "max_position_embeddings": arch.max_context,
        "sliding_window": arch.window or None,
        "rms_norm_eps": 1e-6,
        "attention_bias": arch.qkv_bias and arch.output_bias,
        "mlp_bias": arch.mlp_bias,
        "dtype": dtype,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    }
    if family.startswith("gemma") and not arch.traits.two_head_sizes:
        config |= {"query_pre_attn_scalar": arch.head_dim, "hidden_activation": "gelu_pytorch_tanh"}
    if family == "gemma2":
        config |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if arch.traits.one_part:
        return config | _one_part(arch)
    if arch.traits.multipliers:
        return config | _shared_mlp(arch)
    if arch.traits.parallel:
        return config | _parallel(arch)
    if arch.traits.latents:
        return config | _latents(arch)
    if arch.experts and not arch.traits.two_head_sizes:
        count = "num_experts" if arch.traits.own_expert_width else "num_local_experts"
        config |= {count: arch.experts, "num_experts_per_tok": arch.experts_active}
    if arch.traits.own_expert_width and arch.experts:
        config |= {"moe_intermediate_size": arch.expert_intermediate, "norm_topk_prob": True}
    if arch.traits.hybrid:
        config |= _hybrid(arch)
    if arch.traits.short_convolution:
        config |= _convolutions(arch)
    if arch.traits.head_gates:
        config |= _head_gates(arch)
    if arch.traits.two_head_sizes:
        config |= _two_head_sizes(arch)
    if family == "olmo3":  # layers of each kind turn in their own way
        yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
        config |= {"rope_theta": 500_000.0, "rope_scaling": yarn}
    if family == "seed_oss":
        config |= {"attention_bias": arch.qkv_bias, "attention_out_bias": arch.output_bias}
    if family == "phi3":
        config["original_max_position_embeddings"] = arch.max_context
    return config


def _hybrid(arch: Architecture) -> dict[str, Any]:
    """The fields of gated delta nets, of a shared expert, and of heads that turn in part."""
    kinds = ("linear_attention" if isinstance(kept, RecurrentState) else "full_attention" for kept in arch.layer_caches)
    return {
        "layer_types": list(kinds),
        "linear_num_key_heads": arch.delta_key_heads,
        "linear_num_value_heads": arch.delta_value_heads,
        "linear_key_head_dim": arch.delta_key_dim,
        "linear_value_head_dim": arch.delta_value_dim,
        "linear_conv_kernel_dim": arch.delta_kernel,
        "partial_rotary_factor": (arch.rotary or arch.head_dim) / arch.head_dim,
        "shared_expert_intermediate_size": arch.shared_intermediate or None,
    }


def _convolutions(arch: Architecture) -> dict[str, Any]:
    """The fields of short convolutions."""
    kinds = ("conv" if isinstance(kept, RecurrentState) else "full_attention" for kept in arch.layer_caches)
    return {
        "layer_types": list(kinds),
        "conv_L_cache": arch.conv_kernel,
        "conv_bias": arch.conv_bias,
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": arch.dense_layers,
        "use_expert_bias": arch.selection_bias,
    }


def _shared_mlp(arch: Architecture) -> dict[str, Any]:
    """The fields of a Granite 4.0."""
    kinds = ("linear_attention" if isinstance(kept, RecurrentState) else "full_attention" for kept in arch.layer_caches)
    return {
        "layer_types": list(kinds),
        "intermediate_size": arch.expert_intermediate or arch.intermediate,
        "shared_intermediate_size": arch.shared_intermediate or arch.intermediate,
        "num_local_experts": arch.experts,
        "num_experts_per_tok": arch.experts_active or None,
        "position_embedding_type": None if arch.unrotated else "rope",
        "mamba_n_groups": arch.delta_key_heads or None,
        "mamba_n_heads": arch.delta_value_heads or None,
        "mamba_d_head": arch.delta_value_dim or None,
        "mamba_d_state": arch.delta_key_dim or None,
        "mamba_d_conv": arch.delta_kernel or None,
        "mamba_expand": arch.delta_columns // arch.hidden or None,
    }


def _head_gates(arch: Architecture) -> dict[str, Any]:
    """The fields of a Laguna."""
    shapes = [each for each in arch.attentions if each is not None]
    return {
        "layer_types": ["sliding_attention" if each.window else "full_attention" for each in shapes],
        "num_attention_heads_per_layer": [each.heads for each in shapes],
        "mlp_layer_types": ["dense" if layer < arch.plain_layers else "sparse" for layer in range(arch.layers)],
        "shared_expert_intermediate_size": arch.shared_intermediate or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 500_000.0,
                "partial_rotary_factor": (arch.rotary or arch.head_dim) / arch.head_dim,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }  # fmt: skip


def _parallel(arch: Architecture) -> dict[str, Any]:
    """The fields of a Cohere2 with experts; layers without a window do not turn, unless they are dense."""
    shapes = [each for each in arch.attentions if each is not None]
    return {
        "layer_types": ["sliding_attention" if each.window else "full_attention" for each in shapes],
        "mlp_layer_types": ["dense" if layer < arch.plain_layers else "sparse" for layer in range(arch.layers)],
        "sliding_window": arch.window or arch.max_context,
        "prefix_dense_intermediate_size": arch.intermediate or None,
        "intermediate_size": arch.expert_intermediate or arch.intermediate,
        "num_experts": arch.experts or None,
        "num_experts_per_tok": arch.experts_active or None,
        "num_shared_experts": arch.shared_intermediate // (arch.expert_intermediate or 1),
        "rms_norm_eps": None,
    }


def _latents(arch: Architecture) -> dict[str, Any]:
    """The fields of a GLM-4.7-Flash."""
    return {
        "head_dim": None,
        "qk_nope_head_dim": arch.head_dim - arch.rotary,
        "qk_rope_head_dim": arch.rotary,
        "v_head_dim": arch.value_dim,
        "kv_lora_rank": arch.kv_latent,
        "q_lora_rank": arch.query_latent or None,
        "mlp_layer_types": ["dense" if layer < arch.plain_layers else "sparse" for layer in range(arch.layers)],
        "n_routed_experts": arch.experts or None,
        "num_experts_per_tok": arch.experts_active or None,
        "moe_intermediate_size": arch.expert_intermediate or None,
        "n_shared_experts": arch.shared_intermediate // arch.expert_intermediate if arch.experts else None,
    }


def _one_part(arch: Architecture) -> dict[str, Any]:
    """The fields of layers with one part each."""
    names = {part: name for name, part in reversed(layer_parts.NAMES.items())}
    return {
        "layers_block_type": [names[part] for part in arch.layer_parts],
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": arch.delta_value_heads or None,
        "mamba_head_dim": arch.delta_value_dim or None,
        "n_groups": arch.delta_key_heads or None,
        "ssm_state_size": arch.delta_key_dim or None,
        "conv_kernel": arch.delta_kernel or None,
        "n_routed_experts": arch.experts or None,
        "num_experts_per_tok": arch.experts_active or None,
        "moe_intermediate_size": arch.expert_intermediate or None,
        "moe_shared_expert_intermediate_size": arch.shared_intermediate or None,
    }


def _two_head_sizes(arch: Architecture) -> dict[str, Any]:
    """The fields of layers that differ in their heads."""
    kinds = ("sliding_attention" if each and each.window else "full_attention" for each in arch.attentions)
    return {
        "layer_types": list(kinds),
        "global_head_dim": arch.global_head_dim or arch.head_dim,
        "num_global_key_value_heads": arch.global_kv_heads or arch.kv_heads,
        "attention_k_eq_v": arch.keys_as_values,
        "num_kv_shared_layers": arch.shared_layers,
        "use_double_wide_mlp": arch.wide_shared_layers,
        "hidden_size_per_layer_input": arch.input_width,
        "vocab_size_per_layer_input": arch.input_vocab or arch.vocab,
        "final_logit_softcapping": 30.0,
        "enable_moe_block": bool(arch.experts),
        "top_k_experts": arch.experts_active or None,
        "moe_intermediate_size": arch.expert_intermediate or None,
        "num_experts": arch.experts or None,
    }


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """`config` of a model cut to its first `layers` layers; flat, also where the file nests the text part."""
    if isinstance(config.get("text_config"), dict):
        model_type, text = text_part(config)
        of_text = f"{model_type.removesuffix('_text')}_text" if model_type == config["model_type"] else model_type
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", True), **text, "model_type": of_text}
    lists = (
        *("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types"),
        *("num_attention_heads_per_layer", "no_rope_layers", "layer_rope_theta"),
    )
    per_layer: dict[str, Any] = {key: config[key][:layers] for key in lists if config.get(key)}
    if config.get("num_kv_shared_layers"):  # those of them that stay
        per_layer["num_kv_shared_layers"] = max(
            0, config["num_kv_shared_layers"] + layers - config["num_hidden_layers"]
        )
    if overrides := config.get("per_layer_config"):  # Gemma 4: the last layer is always one of these
        kept = {layer: each for layer, each in overrides.items() if int(layer) < layers}
        per_layer["per_layer_config"] = {**kept, str(layers - 1): next(iter(overrides.values()))}
    return {**config, **per_layer, "num_hidden_layers": layers}


def files_of(name: str, dtype: str = "float16") -> tuple[ModelFiles, str]:
    """The files that stand for a catalogued model NAME or NAME@FORMAT on random weights, and the format ("nf4").

    Raises LocalqError: exit 4 for an unknown name, 2 for a format or an architecture that this cannot be done with.
    """
    base, separator, format = name.rpartition("@")
    entry = catalog.find(base if separator else name)
    published = format_facts.of(entry.default_format)
    format = format if separator else published.name if published.experts_only else DEFAULT
    made = (*FORMATS, *format_facts.full_precision())
    if format not in made:
        raise usage_error("--synthetic", f"random {format} weights are not supported", f"Use one of {', '.join(made)}.")
    if reason := format_facts.why_unsupported(entry.arch, format):
        raise usage_error("--synthetic", f"{entry.name}: {reason}", f"{gpus.fit_command()} lists other models.")
    if entry.arch.experts and not getattr(FORMATS.get(format), "SAMPLES_EXPERTS", True):
        what = f"random expert weights in {format} are not supported"
        raise usage_error("--synthetic", what, "Use --synthetic with @aqlm or @vq2.")
    # as they are published
    in_bfloat16 = format == "bf16" or format_facts.of(format).experts_only or published.experts_only
    config = in_format(config_of(entry.arch, "bfloat16" if in_bfloat16 else dtype), format)
    label = f"{entry.name}@{format} (random weights)"
    return ModelFiles(path=Path(), kind="safetensors", config=config, name=label), format


def in_format(config: dict[str, Any], format: str) -> dict[str, Any]:
    """`config` (of `config_of`) as it is for weights in `format`."""
    return {**config, **random_formats.changes(format, _model(config), config["dtype"])}


def checkpoint(files: ModelFiles, format: str, device: torch.device, seed: int) -> Checkpoint:
    """Random weights for `files`: the block matrices in `format` where it takes them, the rest in 16 bit."""
    model = _model(files.config)
    dtype = getattr(torch, str(files.config.get("dtype", "float16")))
    quantized = {f"{path}.weight" for path in random_formats.linears(model, format)}
    quantized.update(random_experts.stacks(model, format))
    norms = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, RMSNorm)}
    parts: dict[str, TensorSpec] = {}
    for name, parameter in model.named_parameters():
        if name not in quantized:
            is_one = name in norms or name.endswith(FACTORS)
            make = filled(1.0) if is_one else normal(_deviation(name, parameter))
            if name in (HEAD, TABLE, INPUT_TABLE):  # which the loader may quantize, or leave on the host
                make = on_host(make)
            shape = parameter.mT.shape if name in model.transposed else parameter.shape
            parts[name if name == HEAD else f"model.{name}"] = tensor_spec(dtype, tuple(shape), make)
    parts |= random_formats.parts(format, model, seed)
    source = RandomTensors(parts, device, seed)
    return Checkpoint({name: each.info for name, each in parts.items()}, source, files.quantization, files.config)


def _model(config: dict[str, Any]) -> Decoder:
    """Without weights."""
    family = architecture(config)
    with torch.device("meta"):
        model: Decoder = family.Model(family.Config.from_dict(config))
    return model


def _deviation(name: str, parameter: Tensor) -> float:
    """The standard deviation of a dense tensor: unit rows of the table, unit gain of matrices, small biases."""
    if name in (TABLE, INPUT_TABLE):
        return 1.0
    return 0.02 if parameter.dim() == 1 or name.endswith("bias") else parameter.shape[-1] ** -0.5
