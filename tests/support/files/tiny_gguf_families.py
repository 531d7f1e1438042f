"""Tiny random mixtures, hybrids and their like as folders, and as .gguf files by llama.cpp's conversion rules.

The folder is written by transformers, as its models are published; `tiny_gguf_conversion` converts tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.files.tiny_gguf import HEAD, Case, finish
from tests.support.files.tiny_gguf_conversion import Weights, converted, predicting_block
from tests.support.models.tiny_models import MUSE_VISION

SHAPE = {
    "vocab_size": 131, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 80, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
HYBRID = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 22,
    "linear_value_head_dim": 18, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25,
                        "mrope_section": [1, 1, 0], "mrope_interleaved": True},
}  # fmt: skip
SHARED = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
          "shared_expert_intermediate_size": 52}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 3.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 20}  # fmt: skip
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}

CASES = {
    "qwen3moe": Case("qwen3moe", "qwen3_moe", {
        **HEAD, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 44, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1e6}),
    "qwen35": Case("qwen35", "qwen3_5_text", {**HYBRID, "tie_word_embeddings": True}),
    "qwen35-untiled": Case("qwen35", "qwen3_5_text", {**HYBRID, "linear_num_value_heads": 2}),
    "qwen35moe": Case("qwen35moe", "qwen3_5_moe_text", {**HYBRID, **SHARED, "intermediate_size": 44}),
    "gpt-oss": Case("gpt-oss", "gpt_oss", {
        "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "hidden_size": 96,
        "intermediate_size": 64, "rope_parameters": {**YARN, "truncate": False}}),
    "mixtral": Case("llama", "mixtral", {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2,
                                         "intermediate_size": 44, "sliding_window": None, "rope_theta": 1e6}),
    "ministral3": Case("mistral3", "ministral3", {**HEAD, "rope_parameters": GROWING, "tie_word_embeddings": True}),
    "mistral3": Case("mistral3", "mistral", {**HEAD, "sliding_window": None, "rope_theta": 1e6}),
    "muse-glimmer": Case("muse-glimmer", "muse_glimmer_text", {
        **HEAD, "num_hidden_layers": 8, "sliding_window": 9, "final_logit_softcapping": 6.0, "qk_scale_factor": 3.5,
        "output_multiplier": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
}  # fmt: skip
_LAST = ("model.norm.", "lm_head.")


def make_folder(case: Case, folder: Path) -> Path:
    """The model as transformers saves it, in float32; weights are multiples of 1/1024, exact in fp16 as is 1 + w."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if case.architecture == "muse-glimmer":
        return _make_text_folder(case, folder)
    config = AutoConfig.for_model(case.model_type, **{**SHAPE, **case.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model)
    model.save_pretrained(folder)
    return folder


def _make_text_folder(case: Case, folder: Path) -> Path:
    """As `make_folder`, of a text model for which transformers has no class but with a tower."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    parts = {"text_config": {**SHAPE, **case.config}, "vision_config": MUSE_VISION}
    model_type = case.model_type.removesuffix("_text")
    config = AutoConfig.for_model(model_type, **parts, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _draw(model)
    tensors = {name.replace("model.language_model.", "model."): each for name, each in model.state_dict().items()}
    folder.mkdir(parents=True)
    kept = {name: each for name, each in tensors.items() if name.startswith(("model.embed", "model.layers", *_LAST))}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.text_config.to_dict() | {"model_type": case.model_type}))
    return folder


def _draw(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.15
            plain_norm = "norm" in name and bool(parameter.mean() > 0.5)
            parameter.copy_(((plain_norm + drawn) * 1024).round() / 1024)


def read_folder(folder: Path) -> Weights:
    """The tensors of a folder."""
    from safetensors.numpy import load_file

    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def write(
    path: Path,
    case: Case,
    weights: Weights,
    kind: str = "F32",
    *,
    experts: str = "",
    fused: bool = False,
    predicting: int = 0,
    keys: dict[str, int] | None = None,
    change: Callable[[Weights], None] | None = None,
    **options: Any,
) -> Path:
    """A .gguf file of the weights; matrices are stored as `kind`, vectors as F32.

    experts     another kind for gate and up of experts
    fused       gate and up of experts are one stack
    predicting  blocks of multi-token prediction
    keys        other values for the metadata
    change      of the tensors, by GGUF names
    options     of the package's writer
    """
    writer = open_writer(path, case, predicting, **options)
    for key, value in (keys or {}).items():
        for held in writer.kv_data:
            held.pop(f"{case.architecture}.{key}", None)
        writer.add_uint32(f"{case.architecture}.{key}", value)
    config = {**SHAPE, **case.config}
    tensors = dict(converted(case, config, weights))
    for block in range(predicting):
        tensors |= dict(predicting_block(config["num_hidden_layers"] + block, config["hidden_size"]))
    if fused:
        _fuse(tensors)
    if change is not None:
        change(tensors)
    for name, values in tensors.items():
        of_experts = experts and name.endswith(("gate_exps.weight", "up_exps.weight"))
        stored = gguf.GGMLQuantizationType[(experts if of_experts else kind) if values.ndim > 1 else "F32"]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:  # as llama.cpp: rows that are no whole blocks
            stored = gguf.GGMLQuantizationType.F32
        values = np.ascontiguousarray(values, np.float32)
        if stored == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    finish(writer)
    return path


def _fuse(tensors: Weights) -> None:
    for name in [name for name in tensors if name.endswith("ffn_gate_exps.weight")]:
        parts = [tensors.pop(name.replace("_gate_", part)) for part in ("_gate_", "_up_")]
        tensors[name.replace("_gate_", "_gate_up_")] = np.concatenate(parts, 1)


def open_writer(path: Path, case: Case, predicting: int = 0, **options: Any) -> gguf.GGUFWriter:
    """A writer with the metadata of the case; predicting: blocks of multi-token prediction; options: of the writer."""
    config, name = {**SHAPE, **case.config}, case.architecture
    writer = gguf.GGUFWriter(path, name, **options)
    writer.add_block_count(config["num_hidden_layers"] + predicting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if name != "qwen35moe":
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if predicting:
        writer.add_nextn_predict_layers(predicting)
    _add_rope(writer, config)
    _add_experts(writer, case, config)
    if name.startswith("qwen35"):
        _add_delta_net(writer, config)
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if name == "muse-glimmer":
        layers = config["num_hidden_layers"]
        writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(layers)])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_logit_scale(config["output_multiplier"])
    return writer


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = {"rope_theta": config.get("rope_theta"), **config.get("rope_parameters", {})}
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)))
    if sections := rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_experts(writer: gguf.GGUFWriter, case: Case, config: dict[str, Any]) -> None:
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if case.architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    elif width := config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(width)
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)


def _add_delta_net(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_full_attention_interval(4)
