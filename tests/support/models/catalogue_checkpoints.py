"""Tiny random models in the shape of entries of the catalogue: what sets an entry apart is kept, sizes are shrunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from localq.files import format_facts
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
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.models.tiny_models import MUSE_VISION, PIXTRAL, VISION

HEAD, HEADS, WIDTH, EXPERT, WINDOW = 32, 4, 256, 64, 16


def shrunk(arch: Architecture) -> Architecture:
    """The same facts of a small model: rows of whole blocks of every format, windows shorter than the text."""
    kv_heads = {arch.heads: HEADS, 1: 1}.get(arch.kv_heads, HEADS // 2)
    head_dim = HEAD if arch.heads * arch.head_dim == arch.hidden else 2 * HEAD  # then the width is another
    layers = 6 if arch.model_type.startswith("gemma3") else 2  # one of six is not windowed
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
    return replace(small, **_shrunk_hybrid(arch))


def _shrunk_hybrid(arch: Architecture) -> dict[str, int]:
    """Four layers, one of attention; as many value heads share a key head as in the model."""
    if not arch.recurrent_layers:
        return {}
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
    for wrapper, vision in (("mistral3", PIXTRAL), ("muse_glimmer", MUSE_VISION)):
        if arch.model_type in WRAPPERS[wrapper] and arch.model_type != "mistral":  # of which most files are flat
            text = {**fields, "model_type": arch.model_type}
            return wrapper, {"text_config": text, "vision_config": vision, "tie_word_embeddings": arch.tied}
    return arch.model_type, fields


def write(folder: Path, arch: Architecture, format: str, scheme: str) -> Path | None:
    """A model of these (shrunk) facts in `format`; None where no tiny writer has that format for this shape."""
    if format == "gguf":
        folder.mkdir(parents=True)
        return write_with_tokenizer(folder / "model.gguf", scheme)
    if arch.traits.hybrid:
        return _write_hybrid(folder, arch, format, scheme, config_of(arch))
    if format in ("bf16", "fp8", *format_facts.formats_by_tensor()) or arch.experts:
        model_type, fields = published(arch)
        plain = make_checkpoint(folder / "plain", model_type, shard_bytes=2**30, initializer_range=0.15, **fields)
        made = plain if format == "bf16" else _made_of(plain, folder, format, scheme)
    elif arch.model_type in ("gemma3", "muse_glimmer_text"):  # writers below would take Linears of the vision tower too
        return None
    else:
        made = folder / "made"
        _WRITERS[format](made, scheme, model_type=arch.model_type, **config_of(arch))
    return _without_window(made) if not arch.window else made


def _write_hybrid(folder: Path, arch: Architecture, format: str, scheme: str, fields: dict[str, Any]) -> Path:
    """In the wrapper around the text model."""
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
