"""Tiny random transformers models written as .gguf files by the published conversion rules, with the `gguf` package.

The tensor names come from that package's own map, so they are a reference for ours; what the conversion changes about
values (rows of q and k, gemma's norms, rotary factors) is written down here a second time, in the forward direction.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 92,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 80,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HEAD = {"head_dim": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.25, 1.3, 2.0],
        "long_factor": [1.0, 2.0, 4.5, 16.125, 31.7]}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model: `architecture` is GGUF's, `model_type` transformers'."""

    architecture: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("llama", "llama", HEAD),
    "llama-tied-biases": Case(
        "llama", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama3-scaling": Case(
        "llama", "llama", {"head_dim": 64, "max_position_embeddings": 131_072, "rope_parameters": LLAMA3}
    ),
    "llama-linear": Case("llama", "llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-yarn": Case("llama", "llama", {**HEAD, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 20}}),
    "mistral": Case("llama", "mistral", {**HEAD, "sliding_window": None, "rope_theta": 1e6}),
    "qwen2": Case("qwen2", "qwen2", {"use_sliding_window": False, "rope_theta": 1e6, "rms_norm_eps": 1e-6}),
    "qwen3": Case("qwen3", "qwen3", {**HEAD, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "gemma2": Case("gemma2", "gemma2", {**HEAD, "sliding_window": 8, "query_pre_attn_scalar": 16,
                   "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "tie_word_embeddings": True}),
    "gemma2-27b": Case("gemma2", "gemma2", {**HEAD, "num_hidden_layers": 46, "hidden_size": 24, "sliding_window": 8,
                       "query_pre_attn_scalar": 4, "tie_word_embeddings": True}),
    "gemma3": Case("gemma3", "gemma3_text", {
        **HEAD, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "phi3-window": Case("phi3", "phi3", {"sliding_window": 12}),
    "phi3-longrope": Case("phi3", "phi3", {
        "num_attention_heads": 3, "num_key_value_heads": 1, "partial_rotary_factor": 10 / 24, "sliding_window": None,
        "max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_scaling": LONG,
        "tie_word_embeddings": True}),
    "granite": Case("granite", "granite", {
        **HEAD, "rope_theta": 1e7, "tie_word_embeddings": True, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.125, "logits_scaling": 8.0}),
    "granite-plain": Case("granite", "granite", {**HEAD, "attention_multiplier": 0.25, "attention_bias": True}),
    "seed-oss": Case("seed_oss", "seed_oss", {**HEAD, "rope_theta": 1e7}),
    "seed-oss-biases": Case("seed_oss", "seed_oss", {
        **HEAD, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": Case("smollm3", "smollm3", {"tie_word_embeddings": True, "rope_theta": 5000.0}),
}  # fmt: skip


def hugging_face_config(case: Case) -> dict[str, Any]:
    """config.json of the case."""
    return {"model_type": case.model_type, **copy.deepcopy({**SHAPE, **case.config})}


def model(case: Case) -> Any:
    """The transformers model with random weights that fp16 holds exactly."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hugging_face_config(case)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():  # eighths: exact in fp16, and so is 1 + norm
            parameter.copy_(torch.randint(-40, 41, parameter.shape, generator=generator) / 8)
    return made


def converted(case: Case, weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF names and values of Hugging Face weights."""
    config = {**SHAPE, **case.config}
    names = gguf.get_tensor_name_map(_ARCHITECTURE[case.architecture], config["num_hidden_layers"])
    for name, values in weights.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if case.architecture in ("granite", "llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if case.architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        yield stored, values
    yield from rotary_factors(case)


def write(path: Path, case: Case, weights: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """A .gguf file of the model; matrices are stored as `kind`, vectors as F32, as converters do."""
    writer = gguf.GGUFWriter(path, case.architecture)
    write_keys(writer, case)
    for name, values in converted(case, weights):
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        values = np.ascontiguousarray(values, np.float32)
        if stored == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything and close."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_keys(writer: gguf.GGUFWriter, case: Case) -> None:
    """The metadata of the case."""
    config = {**SHAPE, **case.config}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if case.architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.get("attn_logit_softcapping", 50.0))
        writer.add_final_logit_softcapping(config.get("final_logit_softcapping", 30.0))
    if "residual_multiplier" in config:
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    _write_rope(writer, case, config)


_ARCHITECTURE = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = parameters.get("full_attention", parameters)
    return {"rope_theta": config.get("rope_theta", 10_000.0), **parameters}


def _rotary(config: dict[str, Any]) -> int:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return round(head_dim * config.get("partial_rotary_factor", 1.0))


def _write_rope(writer: gguf.GGUFWriter, case: Case, config: dict[str, Any]) -> None:
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type"))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(_rotary(config))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if case.architecture == "phi3":
        original = config.get("original_max_position_embeddings", config["max_position_embeddings"])
        writer.add_rope_scaling_orig_ctx_len(original)


def rotary_factors(case: Case) -> Iterator[tuple[str, np.ndarray]]:
    config = {**SHAPE, **case.config}
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", np.array(list(_llama3_factors(rope, _rotary(config))), np.float32)


def _llama3_factors(rope: dict[str, Any], rotary: int) -> Iterator[float]:
    """By wavelengths, as Llama 3's own code has it."""
    original, low, high = (rope[key] for key in
        ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))  # fmt: skip
    for index in range(0, rotary, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / rotary)
        if wavelength < original / high:
            yield 1.0
        elif wavelength > original / low:
            yield rope["factor"]
        else:
            smooth = (original / wavelength - low) / (high - low)
            yield 1 / ((1 - smooth) / rope["factor"] + smooth)
