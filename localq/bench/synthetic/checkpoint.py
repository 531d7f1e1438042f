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
from localq.files import catalog, format_facts
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
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"


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
    if family.startswith("gemma"):
        config |= {"query_pre_attn_scalar": arch.head_dim, "hidden_activation": "gelu_pytorch_tanh"}
    if family == "gemma2":
        config |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if arch.experts:
        count = "num_experts" if arch.traits.own_expert_width else "num_local_experts"
        config |= {count: arch.experts, "num_experts_per_tok": arch.experts_active}
    if arch.traits.own_expert_width and arch.experts:
        config |= {"moe_intermediate_size": arch.expert_intermediate, "norm_topk_prob": True}
    if arch.traits.hybrid:
        config |= _hybrid(arch)
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


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """`config` of a model cut to its first `layers` layers; flat, also where the file nests the text part."""
    if isinstance(config.get("text_config"), dict):
        model_type, text = text_part(config)
        of_text = f"{model_type.removesuffix('_text')}_text" if model_type == config["model_type"] else model_type
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", True), **text, "model_type": of_text}
    lists = ("layer_types", "no_rope_layers", "layer_rope_theta")
    per_layer = {key: config[key][:layers] for key in lists if config.get(key)}
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
        what = f"random experts in {format} are not supported"
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
            make = filled(1.0) if name in norms else normal(_deviation(name, parameter))
            if name in (HEAD, TABLE):  # which the loader may quantize, or leave on the host
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
    if name == "embed_tokens.weight":
        return 1.0
    return 0.02 if parameter.dim() == 1 or name.endswith("bias") else parameter.shape[-1] ** -0.5
