"""config.json of models with Mamba-2 layers from the metadata of their .gguf files. Torch-free.

After conversion/granite.py and conversion/nemotron.py of llama.cpp: layers without attention have 0 KV heads, and
layers of Nemotron-H without an MLP a width of 0.
"""

from __future__ import annotations

from typing import Any

from localq.errors import ExitCode, LocalqError
from localq.files.gguf.facts import Facts
from localq.files.layer_parts import ATTENTION, EXPERTS, MAMBA, MLP, NAMES

NEMOTRON, GRANITE = ("nemotron_h", "nemotron_h_moe"), "granitehybrid"
ARCHITECTURES = (*NEMOTRON, GRANITE)
_KEYS = {  # of the metadata -> of a config.json of Nemotron-H, and of Granite 4.0
    "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv"), "ssm.state_size": ("ssm_state_size", "mamba_d_state"),
    "ssm.group_count": ("n_groups", "mamba_n_groups"), "ssm.time_step_rank": ("mamba_num_heads", "mamba_n_heads"),
}  # fmt: skip
_SCALES = {  # the same of Granite 4.0
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip


def per_layer(facts: Facts, key: str, layers: int) -> list[int]:
    """A number per layer, 0 included: of a list, or the same for all. Raises LocalqError (exit 8)."""
    stated = facts.values.get(facts.full(key))
    found: list[Any] = stated if isinstance(stated, list) else [stated] * layers
    if len(found) != layers or any(type(each) is not int or each < 0 for each in found):
        raise facts.bad(key, f"is not a list of {layers} numbers, one per layer")
    return found


def largest(facts: Facts, key: str, layers: int) -> int:
    """The number of all layers that have one. Raises LocalqError (exit 8) for several, and for none."""
    found = {each for each in per_layer(facts, key, layers) if each}
    if len(found) != 1:
        raise facts.bad(key, f"has {len(found)} distinct nonzero values; expected one")
    return found.pop()


def head_columns(facts: Facts) -> int:
    """Columns of a head of Mamba-2."""
    inner, heads = facts.integer("ssm.inner_size"), facts.integer("ssm.time_step_rank")
    if inner % heads:
        raise facts.bad("ssm.time_step_rank", f"is {heads}, but must divide ssm.inner_size ({inner})")
    return inner // heads


def read_nemotron(facts: Facts, config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Keys of config.json beyond the common ones, or instead of them; layers: of the file, with those of drafts."""
    heads, widths = (per_layer(facts, key, layers) for key in ("attention.head_count_kv", "feed_forward_length"))
    names = {part: name for name, part in reversed(NAMES.items())}
    parts = [_part(facts, *each) for each in enumerate(zip(heads, widths, strict=True))]
    stated = {name: facts.integer(key) for key, (name, _) in _KEYS.items()} if MAMBA in parts else {}
    return {
        **stated,
        **({"mamba_head_dim": head_columns(facts)} if MAMBA in parts else {}),
        "layers_block_type": [names[part] for part in parts[: config["num_hidden_layers"]]],
        "layer_norm_epsilon": config["rms_norm_eps"],
        **(_mixture(facts) if EXPERTS in parts else {}),
    }


def read_granite(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of config.json beyond the common ones. There are no layers without Mamba-2 alone: those are a "granite"."""
    layers, experts = config["num_hidden_layers"], facts.get("expert_count", int) or 0
    heads = per_layer(facts, "attention.head_count_kv", layers)
    inner, hidden = facts.integer("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise facts.bad("ssm.inner_size", f"is {inner}, but must be a multiple of embedding_length ({hidden})")
    up = facts.container.tensors.get("blk.0.ffn_up_shexp.weight" if experts else "blk.0.ffn_up.weight")
    return {
        **{name: facts.integer(key) for key, (_, name) in _KEYS.items()},
        **{name: facts.number(key, 1.0) for key, name in _SCALES.items()},
        "hidden_act": "silu",
        "mamba_d_head": head_columns(facts),
        "mamba_expand": inner // hidden,
        "layer_types": ["full_attention" if each else "linear_attention" for each in heads],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in facts.container.tensors),
        "shared_mlp_split": True,
        "shared_intermediate_size": up.shape[0] if up else facts.integer("expert_shared_feed_forward_length"),
        "num_local_experts": experts,
        **({"num_experts_per_tok": facts.integer("expert_used_count")} if experts else {}),
    }


def _part(facts: Facts, layer: int, numbers: tuple[int, int]) -> str:
    """The part of a layer with so many KV heads, and an MLP or experts of such a width."""
    kv_heads, width = numbers
    if width:
        return EXPERTS if f"blk.{layer}.ffn_gate_inp.weight" in facts.container.tensors else MLP
    return ATTENTION if kv_heads else MAMBA


def _mixture(facts: Facts) -> dict[str, Any]:
    groups = facts.get("expert_group_count", int, 1) or 1
    if groups > 1:
        why = f"unsupported value for {facts.full('expert_group_count')}: {groups}"
        step = "Use a different GGUF file for this model."
        raise LocalqError(str(facts.container.path), why, step, ExitCode.FAILURE)
    return {
        "n_routed_experts": facts.integer("expert_count"),
        "num_experts_per_tok": facts.integer("expert_used_count"),
        "moe_intermediate_size": facts.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": facts.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": facts.get("expert_weights_norm", bool, True),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
    }
