"""GGUF tensor names -> Hugging Face names, by family.

A family is a GGUF architecture (`general.architecture`), but "mixtral" for a llama with experts. The conventions are
those of llama.cpp (gguf-py/gguf/tensor_mapping.py and the model's class in its converter).
"""

from __future__ import annotations

import re

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma2", "gemma3", "gpt-oss", "mistral3",
    "muse-glimmer", "phi3", "smollm3",
)  # fmt: skip
MIXTURES = frozenset({"mixtral", "qwen3moe", "qwen35moe", "gpt-oss"})  # families

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN35 = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_OWN = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "muse-glimmer": {**_GEMMA, "attn_gate": "self_attn.gate_proj"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "qwen35": _QWEN35,
    "qwen35moe": {
        **_QWEN35,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
}
# Names with a suffix of their own, in both.
_QWEN35_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_WHOLE = {
    "gpt-oss": {"attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias"},
    "qwen35": _QWEN35_WHOLE,
    "qwen35moe": _QWEN35_WHOLE,
}
# Of a stack of experts: where the parts of its rows belong, each an equal share of the rows of an expert.
_STACKS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_EXPERTS = {"qwen3moe": "mlp.experts", "qwen35moe": "mlp.experts", "mixtral": "block_sparse_moe.experts"}
_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# gpt-oss has its experts as wholes: (name, part, parts); the rows of the parts alternate.
_ALTERNATING = {
    "ffn_gate_exps.weight": ("mlp.experts.gate_up_proj", 0, 2),
    "ffn_up_exps.weight": ("mlp.experts.gate_up_proj", 1, 2),
    "ffn_down_exps.weight": ("mlp.experts.down_proj", 0, 1),
    "ffn_gate_exps.bias": ("mlp.experts.gate_up_proj_bias", 0, 2),
    "ffn_up_exps.bias": ("mlp.experts.gate_up_proj_bias", 1, 2),
}
_BLOCK_NAME = re.compile(r"blk\.(\d{1,3})\.(.+)", re.ASCII)

# Rotary factors, stored as tensors: `rope` puts them into the configuration; they are not weights.
FREQUENCY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Norms of queries and keys that only hold a constant, which `config` reads.
_CONSTANTS = {"muse-glimmer": ("attn_q_norm.weight", "attn_k_norm.weight")}


def hugging_face_name(family: str, name: str) -> str | None:
    """The Hugging Face name of GGUF tensor `name`; None when the family has no such tensor, or it is one of experts."""
    if name in _TOP:
        return _TOP[name]
    prefix, rest = _split(name)
    whole = _WHOLE.get(family, {}).get(rest)
    if whole is not None:
        return prefix + whole
    part, _, kind = rest.rpartition(".")
    module = {**_BLOCK, **_OWN.get(family, {})}.get(part)
    return f"{prefix}{module}.{kind}" if prefix and module is not None and kind in ("weight", "bias") else None


def expert_names(family: str, name: str) -> tuple[str, ...]:
    """The names of an expert's matrices in the stack `name`, with {} for its number; () for another tensor."""
    prefix, rest = _split(name)
    part, _, kind = rest.rpartition(".")
    if family not in _EXPERTS or kind != "weight":
        return ()
    parts = _STACKS.get(part, ())
    named = (_MIXTRAL[each] for each in parts) if family == "mixtral" else parts
    return tuple(f"{prefix}{_EXPERTS[family]}.{{}}.{each}.weight" for each in named)


def alternating_part(family: str, name: str) -> tuple[str, int, int] | None:
    """(Hugging Face name, number of the part, parts) where rows of stacks alternate (gpt-oss); None elsewhere."""
    prefix, rest = _split(name)
    if family != "gpt-oss" or rest not in _ALTERNATING:
        return None
    whole, part, parts = _ALTERNATING[rest]
    return prefix + whole, part, parts


def block_number(name: str) -> int | None:
    """The number of the block that a GGUF tensor belongs to; None outside blocks."""
    match = _BLOCK_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def is_constant(family: str, name: str) -> bool:
    """True for tensors that hold numbers of the configuration: rotary factors, and norms without weights.

    Rotary factors are one tensor, or one per block (older files).
    """
    rest = _split(name)[1]
    return rest in FREQUENCY_TENSORS or (rest != name and rest in _CONSTANTS.get(family, ()))


def _split(name: str) -> tuple[str, str]:
    """("model.layers.3.", "attn_q.weight") of a tensor of a block; ("", name) of another."""
    match = _BLOCK_NAME.fullmatch(name)
    return ("", name) if match is None else (f"model.layers.{int(match[1])}.", match[2])
