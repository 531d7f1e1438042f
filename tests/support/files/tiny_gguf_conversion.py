"""llama.cpp's conversion of mixtures, hybrids and their like, in the forward direction: names and values.

After its converter (conversion/qwen.py, gpt_oss.py, llama.py, mistral3.py and muse_glimmer.py). Names come from the
`gguf` package's own map, where it knows the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

from tests.support.files.tiny_gguf import Case

_MUSE = {  # an architecture that the package does not know yet
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.gate_proj": "attn_gate", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
_ARCHITECTURE = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
Weights = dict[str, np.ndarray]


def converted(case: Case, config: dict[str, Any], weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF names and values of Hugging Face weights; config: of config.json."""
    plain = {name: each for name, each in weights.items() if not _EXPERT.fullmatch(name)}
    for name, values in plain.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if case.architecture == "gpt-oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, values)
            continue
        for renamed, changed in _changed(case, config, name, values):
            yield _gguf_name(case, config, renamed), changed
    yield from _stacks(case, config, weights)
    if case.architecture == "gemma4":
        rope = config["rope_parameters"]["full_attention"]
        pairs, turning = (
            config["global_head_dim"] // 2,
            int(config["global_head_dim"] * rope["partial_rotary_factor"] / 2),
        )
        yield "rope_freqs.weight", np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)


def _changed(case: Case, config: dict[str, Any], name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Names as the converter changes them before it asks the map, and values."""
    of = case.architecture
    if of in ("granitehybrid", "llama", "mistral3", "muse-glimmer") and name.endswith(
        ("q_proj.weight", "k_proj.weight")
    ):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        half = values.shape[0] // heads // 2
        values = values.reshape(heads, 2, half, -1).transpose(0, 2, 1, 3).reshape(values.shape)
    elif of == "muse-glimmer" and name.endswith("layernorm.weight"):
        values = values + np.float32(1)
    elif of.startswith("qwen35"):
        name, values = _changed_hybrid(config, name, values)
    elif of == "gemma4":
        name = _gemma4_name(name)
    elif of.startswith("lfm2"):
        name, values = (
            name.replace(".expert_bias", ".expert_bias.bias"),
            values.squeeze(1) if ".conv.conv." in name else values,
        )
    elif of.startswith("nemotron"):
        name, values = _changed_mamba(config, name.replace("model.layers.", "backbone.layers."), values)
    elif of == "granitehybrid":
        name, values = _changed_mamba(config, _granite_name(config, name), values)
    elif name.endswith(".sinks"):
        name += ".weight"
    yield name, values
    if of == "muse-glimmer" and name.endswith("self_attn.q_proj.weight"):
        block = name.split(".")[2]
        ones = np.ones(config["head_dim"], np.float32)
        yield f"blk.{block}.attn_q_norm.weight", ones * np.float32(config["qk_scale_factor"])
        yield f"blk.{block}.attn_k_norm.weight", ones


def _changed_mamba(config: dict[str, Any], name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """As `Mamba2Model.modify_tensors` of llama.cpp's conversion/mamba.py, and conversion/nemotron.py."""
    if name.endswith(".A_log"):
        values = -np.exp(values)[:, None]
    elif name.endswith(".D"):
        values = values[:, None]
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        values = values.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    elif name.endswith(".conv1d.weight"):
        values = values.squeeze(1)
    name = name.replace(".mamba.dt_bias", ".mamba.dt_proj.bias")
    return name.replace(".dt_bias", ".dt.bias").replace("e_score_correction_bias", "e_score_correction.bias"), values


def _granite_name(config: dict[str, Any], name: str) -> str:
    """The shared MLP has the names of an MLP where there are no experts."""
    block, _, part = name.partition(".shared_mlp.")
    suffix = "_shexp" if config["num_local_experts"] else ""
    return f"blk.{block.split('.')[2]}.ffn_{part.partition('_')[0]}{suffix}.weight" if part else name


def _gemma4_name(name: str) -> str:
    """The GGUF name of the tensors that llama.cpp's converter names itself; else as it is."""
    block = name.split(".")[2]
    own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
           "layer_scalar": "layer_output_scale.weight"}  # fmt: skip
    return next((f"blk.{block}.{new}" for old, new in own.items() if name.endswith(old)), name)


def _changed_hybrid(config: dict[str, Any], name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    if ".linear_attn." not in name:
        return name, values + np.float32(1) if name.endswith("norm.weight") else values
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    per_key, dim = config["linear_num_value_heads"] // keys, config["linear_value_head_dim"]
    if ".conv1d." in name or ".in_proj_qkv." in name:
        values = values.squeeze(1) if ".conv1d." in name else values
        first = 2 * keys * key_dim
        values = np.concatenate([values[:first], tiled(values[first:], keys, per_key, dim)])
    elif ".in_proj_z." in name:
        values = tiled(values, keys, per_key, dim)
    elif ".out_proj." in name:
        values = tiled(values.T, keys, per_key, dim).T
    elif ".linear_attn.norm." not in name:
        values = tiled(values, keys, per_key, 1)
    if name.endswith(".A_log"):
        values = -np.exp(values)
    return name.replace(".dt_bias", ".dt_proj.bias"), values


def tiled(values: np.ndarray, keys: int, per_key: int, dim: int) -> np.ndarray:
    """Rows of value heads, those of a key head together, with value head 0 of every key head first."""
    rows = [
        (key * per_key + value) * dim + row for value in range(per_key) for key in range(keys) for row in range(dim)
    ]
    return np.stack([values[row] for row in rows])


def _gpt_oss_experts(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    prefix = f"blk.{name.split('.')[2]}.ffn_"
    kind = "bias" if name.endswith("_bias") else "weight"
    values = values if kind == "bias" else values.transpose(0, 2, 1)
    if ".down_proj" in name:
        yield f"{prefix}down_exps.{kind}", values
    else:
        yield f"{prefix}gate_exps.{kind}", values[:, ::2]
        yield f"{prefix}up_exps.{kind}", values[:, 1::2]


def _stacks(case: Case, config: dict[str, Any], weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    """Matrices of experts as stacks."""
    found: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, values in weights.items():
        if match := _EXPERT.fullmatch(name):
            found.setdefault((match[1], match[3]), {})[int(match[2])] = values
    if case.architecture == "gemma4":  # gate and up are one stack
        for prefix in {prefix for prefix, _ in found}:
            gates, ups = found.pop((prefix, "gate_proj")), found.pop((prefix, "up_proj"))
            found[prefix, "gate_up_proj"] = {each: np.concatenate((gates[each], ups[each])) for each in gates}
    for (prefix, part), matrices in found.items():
        stack = np.stack([matrices[expert] for expert in range(len(matrices))])
        joined = f"{prefix}.experts.{part}.weight"
        if case.architecture in ("lfm2moe", "llama"):
            joined = f"layers.{prefix.split('.')[2]}.feed_forward.experts.{part}.weight"
        elif case.architecture == "granitehybrid":
            joined = f"blk.{prefix.split('.')[2]}.ffn_{part.partition('_')[0]}_exps.weight"
        elif case.architecture == "nemotron_h_moe":
            joined = joined.replace(".mixer.", ".mlp.")
        yield _gguf_name(case, config, joined), stack


def _gguf_name(case: Case, config: dict[str, Any], name: str) -> str:
    if name.startswith("blk."):
        return name
    if case.architecture == "muse-glimmer":
        stem, _, suffix = name.rpartition(".")
        parts = stem.split(".", 3)
        return f"blk.{parts[2]}.{_MUSE[parts[3]]}.{suffix}" if len(parts) == 4 else f"{_MUSE[stem]}.{suffix}"
    layers = config["num_hidden_layers"] or len(config["hybrid_override_pattern"])
    names = gguf.get_tensor_name_map(_ARCHITECTURE[case.architecture], layers)
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return stored


def predicting_block(block: int, hidden: int) -> Iterator[tuple[str, np.ndarray]]:
    """Some tensors of a block of multi-token prediction."""
    yield f"blk.{block}.nextn.eh_proj.weight", np.ones((hidden, 2 * hidden), np.float32)
    for name in ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_norm", "post_attention_norm"):
        yield f"blk.{block}.{name}.weight", np.ones(hidden, np.float32)
    for name in ("attn_q", "ffn_gate"):
        yield f"blk.{block}.{name}.weight", np.ones((hidden, hidden), np.float32)
