"""Tiny random Hugging Face checkpoints: sharded safetensors, a working byte-level tokenizer, a chat template.

`make_checkpoint(tmp_path, "qwen3")` gives a folder that localq and transformers both load in well under a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 256, 257, 258
VOCAB = 320  # 256 bytes, the special tokens, some merges, and ids that no text gives
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Wrappers of which transformers has no class for their text alone.
WITH_IMAGES = ("gemma4", "gemma4_unified", "mistral3", "muse_glimmer", "qwen3_vl")

# All sizes differ from each other; every Linear has a multiple of 64 columns, so that NF4 applies.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
HYBRID: dict[str, Any] = {  # three value heads share a key head, and a quarter of a head of attention turns
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                        "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma4_text": {
        "global_head_dim": 48, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 16, "truncate": False,
        },
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64, "num_dense_layers": 1, "initializer_range": 0.1,
    },
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.1},
    "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 0.3,
    },
    "olmo3": {
        "sliding_window": 16, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0,
                               "original_max_position_embeddings": 128},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0}},
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 8,
        "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16, "shared_intermediate_size": 192,
        "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 64, "initializer_range": 0.1,
        "attention_multiplier": 0.3, "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
    },
    "cohere2_moe": {
        "sliding_window": 16, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 256, "num_experts": 5,
        "num_experts_per_tok": 3, "num_shared_experts": 2, "logit_scale": 0.5, "initializer_range": 0.1,
    },
    "glm4_moe_lite": {
        "head_dim": None, "num_key_value_heads": 4, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 48,
        "kv_lora_rank": 80, "q_lora_rank": 64, "n_routed_experts": 5, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "moe_intermediate_size": 64, "initializer_range": 0.1,
    },
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 16,
        "num_attention_heads_per_layer": [4, 6, 6], "num_experts": 5, "num_experts_per_tok": 3,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 192, "moe_routed_scaling_factor": 2.5,
        "initializer_range": 0.1,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "time_step_min": 1e-30,
        "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "routed_scaling_factor": 1.5,
        "moe_shared_expert_intermediate_size": 192, "initializer_range": 0.1,
    },
    "phi3": {"head_dim": None, "sliding_window": None},
    "qwen3_5_text": {**HYBRID, "initializer_range": 0.1},
    "qwen3_5_moe_text": {
        **HYBRID, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 192, "initializer_range": 0.1,
    },
    "qwen3_moe": {
        "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "mlp_only_layers": [1], "initializer_range": 0.1,
    },
}  # fmt: skip


def make_config(model_type: str = "llama", **overrides: Any) -> Any:
    """The transformers configuration of a tiny model of that type."""
    from transformers import AutoConfig

    fields = {**TINY, **EXTRA.get(model_type, {}), **overrides}
    if "text_config" in overrides:  # of a wrapper around a text model, which has all the sizes
        inside = {**TINY, **EXTRA.get(f"{model_type}_text", {}), **overrides["text_config"]}
        given = {key: value for key, value in inside.items() if value is not None}
        fields = {**overrides, "text_config": given, "eos_token_id": TINY["eos_token_id"]}
    return AutoConfig.for_model(model_type, **{key: value for key, value in fields.items() if value is not None})


def make_model(model_type: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model with random float32 weights, in eval mode."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto_class = AutoModelForImageTextToText if model_type in WITH_IMAGES else AutoModelForCausalLM
    model = auto_class.from_config(make_config(model_type, **overrides))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # of heads that forget at once transformers sums decays with an error of 1e-4
                parameter -= 2
            if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mistake
                parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    return model.eval()


def make_checkpoint(
    folder: Path,
    model_type: str = "llama",
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 200_000,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """A checkpoint of a tiny random model in `folder` (made if need be): weights, configuration, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(model_type, seed=seed, **overrides).to(dtype)
    model.config.dtype = dtype
    model.generation_config.eos_token_id = [258, 256]
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE with a few merges and a ChatML template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)} | {SPECIAL_TOKENS[0]: 256}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("a", "n")]
    vocab |= {left + right: 259 + index for index, (left, right) in enumerate(merges)}
    vocab |= {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
