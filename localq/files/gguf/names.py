"""GGUF tensor names -> Hugging Face names, by family.

A family is a GGUF architecture (`general.architecture`), but "mixtral" for a llama with experts. The conventions are
those of llama.cpp (gguf-py/gguf/tensor_mapping.py and the model's class in its converter).
"""

from __future__ import annotations

import re

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "qwen3moe", "qwen3vl", "qwen35", "qwen35moe", "gemma2", "gemma3", "gemma4", "gpt-oss",
    "mistral3", "muse-glimmer", "exaone4", "granite", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h",
    "nemotron_h_moe", "olmo2", "phi3", "seed_oss", "smollm3",
)  # fmt: skip
MIXTURES = frozenset(  # families
    {"gemma4", "granitehybrid", "lfm2moe", "mixtral", "nemotron_h_moe", "qwen3moe", "qwen35moe", "gpt-oss"}
)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",  # of LFM2: the last norm
    "output.weight": "lm_head.weight",
}
_GEMMA4_TOP = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
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
_BEHIND = {  # norms behind attention and the MLP only
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
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
    # Of the block that predicts the token after the next (`mtp_name`).
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.enorm",
    "nextn.hnorm": "mtp.hnorm",
    "nextn.shared_head_norm": "mtp.norm",
}
# As files hold them under `mtp.`; until then the norms of what is joined keep names whose layout is that of norms.
_MTP = {"mtp.enorm": "mtp.pre_fc_norm_embedding", "mtp.hnorm": "mtp.pre_fc_norm_hidden"}
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")  # of the model's own, which serve as well
_NEMOTRON = {
    "attn_norm": "norm",
    **{
        stored: name.replace("self_attn.", "mixer.") for stored, name in _BLOCK.items() if name.startswith("self_attn.")
    },
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_GRANITE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}{kind}": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down") for kind in ("", "_shexp")},
}
_OWN = {
    "exaone4": _BEHIND,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": {
        **_GEMMA,
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp": "router.proj",
    },
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "lfm2": _LFM2,
    "lfm2moe": {**_LFM2, "ffn_gate_inp": "feed_forward.gate"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "muse-glimmer": {**_GEMMA, "attn_gate": "self_attn.gate_proj"},
    "olmo2": _BEHIND,
    "granitehybrid": _GRANITE,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
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
_NEMOTRON_WHOLE = {
    "ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_dt.bias": "mixer.dt_bias",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
}  # fmt: skip
_WHOLE = {
    "gemma4": {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    "gpt-oss": {"attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias"},
    "lfm2moe": {"exp_probs_b.bias": "feed_forward.expert_bias"},
    "granitehybrid": {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
    "nemotron_h": _NEMOTRON_WHOLE,
    "nemotron_h_moe": _NEMOTRON_WHOLE,
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
_EXPERTS = {
    "gemma4": "experts",
    "lfm2moe": "feed_forward.experts",
    "granitehybrid": "block_sparse_moe.experts",
    "nemotron_h_moe": "mixer.experts",
    "qwen3moe": "mlp.experts",
    "qwen35moe": "mlp.experts",
    "mixtral": "block_sparse_moe.experts",
}
_NUMBERED = frozenset({"lfm2moe", "mixtral"})  # families whose matrices of experts have numbers
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
    if family == "gemma4" and name in _GEMMA4_TOP:
        return _GEMMA4_TOP[name]
    prefix, rest = _split(name)
    whole = _WHOLE.get(family, {}).get(rest)
    if whole is not None:
        return prefix + whole
    part, _, kind = rest.rpartition(".")
    module = {**_BLOCK, **_OWN.get(family, {})}.get(part)
    return f"{prefix}{module}.{kind}" if prefix and module is not None and kind in ("weight", "bias") else None


def mtp_name(name: str, layers: int) -> str:
    """The name under `mtp.` of a tensor of block `layers`, behind the last one, from its Hugging Face name."""
    rest = name.removeprefix(f"model.layers.{layers}.")
    if not rest.startswith("mtp."):
        return f"mtp.layers.0.{rest}"
    part, _, kind = rest.rpartition(".")
    return f"{_MTP.get(part, part)}.{kind}"


def is_copy(name: str) -> bool:
    """True for a tensor of such a block that is the embedding or the head of the model once more."""
    return _split(name)[1] in _COPIES


def expert_names(family: str, name: str) -> tuple[str, ...]:
    """The names of an expert's matrices in the stack `name`, with {} for its number; () for another tensor."""
    prefix, rest = _split(name)
    part, _, kind = rest.rpartition(".")
    if family not in _EXPERTS or kind != "weight":
        return ()
    parts = _STACKS.get(part, ())
    named = (_MIXTRAL[each] for each in parts) if family in _NUMBERED else parts
    return tuple(f"{prefix}{_EXPERTS[family]}.{{}}.{each}.weight" for each in named)


def alternating_part(family: str, name: str) -> tuple[str, int, int] | None:
    """(Hugging Face name, number of the part, parts) where rows of stacks alternate (gpt-oss); None elsewhere."""
    prefix, rest = _split(name)
    if family != "gpt-oss" or rest not in _ALTERNATING:
        return None
    whole, part, parts = _ALTERNATING[rest]
    return prefix + whole, part, parts


def scaled_tensor(family: str, name: str) -> str | None:
    """The tensor of matrices that belongs to a tensor of factors: "X.weight" for "X.scale", which multiplies it.

    "X.input_scale" is one for activations, which stay in 16 bit. None for other tensors.
    """
    part, _, kind = name.rpartition(".")
    owner = f"{part}.weight"
    known = hugging_face_name(family, name) is not None or alternating_part(family, owner) is not None
    return None if known or kind not in ("scale", "input_scale") else owner


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
