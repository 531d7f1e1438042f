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

from tests.support.files import tiny_gguf_nvfp4
from tests.support.files.tiny_gguf import HEAD, Case, finish
from tests.support.files.tiny_gguf_conversion import Weights, converted, predicting_block
from tests.support.models.tiny_models import TEXT_TOWERS

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

GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "num_key_value_heads": 2, "num_global_key_value_heads": 3,
    "num_hidden_layers": 6, "sliding_window": 9, "tie_word_embeddings": True,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 131, "final_logit_softcapping": 6.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}  # fmt: skip

LFM2 = {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"], "norm_eps": 1e-5,
        "rope_theta": 1e6}  # fmt: skip

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
    "exaone4": Case("exaone4", "exaone4", {**HEAD, "sliding_window": 9, "rope_theta": 1e6}),
    "exaone4-small": Case("exaone4", "exaone4", {
        **HEAD, "sliding_window": None, "layer_types": ["full_attention"] * 5, "rope_theta": 1e6,
        "tie_word_embeddings": True}),
    "lfm2": Case("lfm2", "lfm2", {
        **HEAD, **LFM2, "conv_L_cache": 4, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.5}),
    "lfm2moe": Case("lfm2moe", "lfm2_moe", {
        **HEAD, **LFM2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 44, "num_dense_layers": 2,
        "tie_word_embeddings": True}),
    "qwen3vl": Case("qwen3vl", "qwen3_vl_text", {**HEAD, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [3, 3, 2], "mrope_interleaved": True}}),
    "olmo3": Case("olmo2", "olmo3", {**HEAD, "sliding_window": 9, "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }}),
    "olmo2": Case("olmo2", "olmo2", {**HEAD, "num_key_value_heads": 6, "rope_theta": 5e5}),
    "gemma4": Case("gemma4", "gemma4_text", {**GEMMA4, "attention_k_eq_v": True}),
    "gemma4-small": Case("gemma4", "gemma4_text", {
        **GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 131, "num_global_key_value_heads": 2}),
    "gemma4-moe": Case("gemma4", "gemma4_text", {
        **GEMMA4, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 3,
        "moe_intermediate_size": 44}),
}  # fmt: skip
NEMOTRON = {
    "head_dim": 16, "num_hidden_layers": None, "rms_norm_eps": None, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 6,
    "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 12, "conv_kernel": 4, "time_step_min": 1e-30,
}  # fmt: skip
GRANITE = {
    **HEAD, "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 4,
    "shared_intermediate_size": 52, "attention_multiplier": 0.4, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6, "logits_scaling": 1.7, "shared_mlp_split": True,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
CASES |= {
    "granite-hybrid": Case("granitehybrid", "granitemoehybrid", {
        **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44}),
    "granite-hybrid-dense": Case("granitehybrid", "granitemoehybrid", {
        **GRANITE, "num_local_experts": 0, "tie_word_embeddings": True}),
    "nemotron": Case("nemotron_h", "nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M-M*M-"}),
    "nemotron-moe": Case("nemotron_h_moe", "nemotron_h", {
        **NEMOTRON, "hybrid_override_pattern": "MEM*E", "n_routed_experts": 5, "num_experts_per_tok": 3, "n_group": 1,
        "moe_intermediate_size": 44, "moe_shared_expert_intermediate_size": 52, "routed_scaling_factor": 2.5,
        "intermediate_size": 44}),
}  # fmt: skip
_LAST = ("model.norm.", "lm_head.")


def make_folder(case: Case, folder: Path) -> Path:
    """The model as transformers saves it, in float32; weights are multiples of 1/1024, exact in fp16 as is 1 + w."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if case.model_type in TEXT_TOWERS:
        return _make_text_folder(case, folder)
    stated = {**SHAPE, **case.config}
    for key in [key for key in ("num_hidden_layers", "rms_norm_eps") if stated[key] is None]:
        del stated[key]  # which the family calls otherwise
    config = AutoConfig.for_model(case.model_type, **stated)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model)
    model.save_pretrained(folder)
    if case.architecture == "gemma4":
        _split_experts(folder)
    elif case.architecture == "granitehybrid":
        _split_shared(folder)
    elif case.architecture.startswith("nemotron"):
        named = {"embeddings.": "embed_tokens.", "norm_f.": "norm.", "": ""}
        _rename(folder, {f"backbone.{old}": f"model.{new}" for old, new in named.items()})
    return folder


def _split_shared(folder: Path) -> None:
    """Store experts, gate and up of a Granite 4.0 matrix by matrix."""
    from safetensors.torch import load_file, save_file

    halves = ("gate_proj", "up_proj")
    found = {}
    for name, values in load_file(folder / "model.safetensors").items():
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in ("input_linear", "output_linear"):
            found[name] = values
            continue
        stacked = values.ndim == 3
        for number, matrix in enumerate(values if stacked else values[None]):
            home = f"{stem}.experts.{number}" if stacked else stem
            rows = dict(zip(halves, matrix.chunk(2), strict=True)) if part == "input_linear" else {"down_proj": matrix}
            found |= {f"{home}.{of}.weight": each.contiguous() for of, each in rows.items()}
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def _rename(folder: Path, names: dict[str, str]) -> None:
    """Replace the beginnings of names of tensors: files of GGUF are read under the usual ones."""
    from safetensors.torch import load_file, save_file

    found = {}
    for name, values in load_file(folder / "model.safetensors").items():
        old = next((old for old in names if name.startswith(old)), "")
        found[names[old] + name.removeprefix(old) if old else name] = values
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def _split_experts(folder: Path) -> None:
    """Store stacks of experts matrix by matrix, under the names that other families have."""
    from safetensors.torch import load_file, save_file

    found = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = values
            continue
        stem, _, part = name.rpartition(".")
        for expert, matrix in enumerate(values):
            rows = (
                dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                if "gate_up" in part
                else {part: matrix}
            )
            found |= {f"{stem}.{expert}.{of}.weight": each.contiguous() for of, each in rows.items()}
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def _make_text_folder(case: Case, folder: Path) -> Path:
    """As `make_folder`, of a text model for which transformers has no class but with a tower."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    parts = {"text_config": {**SHAPE, **case.config}, **TEXT_TOWERS[case.model_type]}
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
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_((torch.randn(buffer.shape, generator=generator) * 150).round() / 1024)
            if name.endswith("layer_scalar"):
                buffer.copy_(((1 + torch.randn(1, generator=generator) * 0.15) * 1024).round() / 1024)
            if name.endswith("expert_bias"):
                buffer.copy_((torch.randn(buffer.shape, generator=generator) * 1024).round() / 1024)


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

    experts     another kind for gate and up of experts, MXFP4 for down too
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
        layers = config["num_hidden_layers"] or len(config["hybrid_override_pattern"])
        tensors |= dict(predicting_block(layers + block, config["hidden_size"]))
    if fused:
        _fuse(tensors)
    if change is not None:
        change(tensors)
    for name, values in tensors.items():
        parts = ("gate", "up", "down") if experts == "MXFP4" else ("gate", "up")
        of_experts = experts and name.endswith(tuple(f"{part}_exps.weight" for part in parts))
        is_wide = values.ndim == 1 or name.endswith(("ssm_a", "ssm_d", "ssm_norm.weight"))  # whatever their shape
        stored = gguf.GGMLQuantizationType["F32" if is_wide else experts if of_experts else kind]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]:  # as llama.cpp: rows that are no whole blocks
            stored = gguf.GGMLQuantizationType.F32
        values = np.ascontiguousarray(values, np.float32)
        if stored == gguf.GGMLQuantizationType.NVFP4:
            for part, data in tiny_gguf_nvfp4.stored(name, values).items():
                writer.add_tensor(part, data, raw_dtype=stored if part == name else None)
        elif stored == gguf.GGMLQuantizationType.F16:
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
    if name.startswith("nemotron"):
        _add_nemotron(writer, config, predicting)
        return writer
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
    if name == "granitehybrid":
        _add_granite(writer, config)
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if name == "gemma4":
        _add_gemma4(writer, config)
    if name.startswith("lfm2"):
        _add_lfm2(writer, config)
    if name in ("exaone4", "olmo2") and window:
        writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])])
    if name == "muse-glimmer":
        layers = config["num_hidden_layers"]
        writer.add_sliding_window_pattern([(layer + 1) % 4 != 0 for layer in range(layers)])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_logit_scale(config["output_multiplier"])
    return writer


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As `Gemma4Model.set_gguf_parameters` of llama.cpp's conversion/gemma.py, which writes some keys again."""
    windowed = [each == "sliding_attention" for each in config["layer_types"]]
    shared, width = config.get("num_kv_shared_layers", 0), config["intermediate_size"]
    for held in writer.kv_data:
        for key in ("attention.key_length", "attention.value_length", "attention.head_count_kv", "feed_forward_length",
                    "rope.dimension_count", "rope.freq_base"):  # fmt: skip
            held.pop(f"gemma4.{key}", None)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(windowed)
    for add, of in ((writer.add_key_length, "global_head_dim"), (writer.add_value_length, "global_head_dim"),
                    (writer.add_key_length_swa, "head_dim"), (writer.add_value_length_swa, "head_dim")):  # fmt: skip
        add(config[of])
    wide = len(windowed) - shared if config.get("use_double_wide_mlp") else len(windowed)
    widths = [width if layer < wide else 2 * width for layer in range(len(windowed))]
    writer.add_feed_forward_length(widths if wide < len(windowed) else width)
    heads = (config["num_global_key_value_heads"], config["num_key_value_heads"])
    writer.add_head_count_kv([heads[each] for each in windowed])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As `LFM2Model` and `LFM2MoeModel` of llama.cpp's converter."""
    for held in writer.kv_data:
        for key in ("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "feed_forward_length"):
            held.pop(f"{writer.arch}.{key}", None)
    kinds = config["layer_types"]
    writer.add_head_count_kv([0 if each == "conv" else config["num_key_value_heads"] for each in kinds])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_shortconv_l_cache(config.get("conv_L_cache", 3))
    if "num_experts" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    width, multiple = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3)), 32
    writer.add_feed_forward_length(multiple * -(-width // multiple))


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As `GraniteHybridModel` of llama.cpp's conversion/granite.py, which writes some keys again."""
    for held in writer.kv_data:
        for key in ("attention.head_count_kv", "rope.freq_base"):
            held.pop(f"granitehybrid.{key}", None)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    attends = [each == "full_attention" for each in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] if each else 0 for each in attends])
    writer.add_rope_scaling_finetuned(False)


def _add_nemotron(writer: gguf.GGUFWriter, config: dict[str, Any], predicting: int) -> None:
    """As `NemotronHModel.set_gguf_parameters` of llama.cpp's conversion/nemotron.py; there are no rotary keys."""
    pattern = config["hybrid_override_pattern"]
    is_moe, drafts = "n_routed_experts" in config, "" if not predicting else "*"
    writer.add_block_count(len(pattern) + predicting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    width = config["moe_intermediate_size" if is_moe else "intermediate_size"]
    writer.add_feed_forward_length([width if each in "E-" else 0 for each in pattern] + [width] * predicting)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] if each == "*" else 0 for each in pattern + drafts])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    if predicting:
        writer.add_nextn_predict_layers(predicting)
    if is_moe:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(1)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = {"rope_theta": config.get("rope_theta", 1e4), **config.get("rope_parameters", {})}
    rope = rope.get("full_attention", rope)
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
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
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
