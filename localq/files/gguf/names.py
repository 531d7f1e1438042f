"""GGUF tensor names -> Hugging Face names, and the architectures with changed values in GGUF.

The conventions are those of llama.cpp (convert_hf_to_gguf.py, gguf-py/gguf/tensor_mapping.py): it interleaves the rows
of q and k of llama-like models for its rotary kernel, and adds 1 to gemma's norms.
"""

from __future__ import annotations

import re

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3")  # `general.architecture`
PERMUTED = frozenset({"llama", "smollm3"})
OFFSET_NORMS = frozenset({"gemma2", "gemma3"})

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
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OWN = {"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": _PHI3}
_BLOCK_NAME = re.compile(r"blk\.(\d{1,3})\.(\w+)\.(weight|bias)", re.ASCII)

# Rotary factors, stored as tensors: `rope` puts them into the configuration; they are not weights.
FREQUENCY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hugging_face_name(architecture: str, name: str) -> str | None:
    """The Hugging Face name of GGUF tensor `name`; None when the architecture has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return None
    block, part, kind = match.groups()
    module = {**_BLOCK, **_OWN.get(architecture, {})}.get(part)
    return None if module is None else f"model.layers.{int(block)}.{module}.{kind}"


def is_frequency_tensor(name: str) -> bool:
    """True for rotary factors, one tensor or one per block (older files)."""
    return name in FREQUENCY_TENSORS or name.endswith(tuple("." + each for each in FREQUENCY_TENSORS))
