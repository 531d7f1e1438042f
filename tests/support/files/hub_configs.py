"""Configurations of published models, one of each family and some besides."""

from __future__ import annotations

from typing import Any

# config.json as the hub has it, without what does not matter here; what is missing is missing there too. Those of
# Ministral and Muse are what transformers documents.
_MROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "torch_dtype": "bfloat16",
    },
    "mistral-nemo-12b": {
        "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 131072,
        "max_position_embeddings": 131072, "sliding_window": None, "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None, "tie_word_embeddings": False,
    },
    "glm-4.7-flash": {  # as transformers' class has it
        "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "vocab_size": 154880,
        "max_position_embeddings": 202752, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": False,
    },
    "exaone-4-32b": {
        "model_type": "exaone4", "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102400,
        "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16, "tie_word_embeddings": False,
        "rope_theta": 1000000, "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0,
                                                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "exaone-4-1.2b": {
        "model_type": "exaone4", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 102400,
        "max_position_embeddings": 65536, "sliding_window": None, "layer_types": ["full_attention"] * 30,
        "tie_word_embeddings": True,
    },
    "granite-3.3-8b": {
        "model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49159, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False, "rope_theta": 10000000.0,
        "rope_scaling": None, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 16.0, "rms_norm_eps": 1e-5,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 128000, "conv_L_cache": 3,
        "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "norm_eps": 1e-5, "rope_theta": 1000000.0,
        "tie_embedding": True,
    },
    "lfm2.5-8b-a1b": {
        "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128000,
        "max_position_embeddings": 128000, "conv_L_cache": 3, "num_dense_layers": 2, "num_experts": 32,
        "num_experts_per_tok": 4, "use_expert_bias": True, "norm_topk_prob": True, "norm_eps": 1e-5,
        "layer_types": ["full_attention" if each in (2, 6, 10, 14, 18, 21) else "conv" for each in range(24)],
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
    },
    "olmo-3-7b": {
        "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278, "tie_word_embeddings": False,
        "max_position_embeddings": 65536, "sliding_window": 4096, "rope_theta": 500000, "attention_bias": False,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                         "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
        "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "attention_bias": False,
        "max_position_embeddings": 40960, "sliding_window": None, "tie_word_embeddings": True,
        "dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl", "tie_word_embeddings": False, "vision_config": {"depth": 27},
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 262144, "attention_bias": False, "rope_theta": 5000000,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": False, "sliding_window": None, "attention_bias": False,
    },
    "qwen3.8-27b": {
        "model_type": "qwen3_5", "tie_word_embeddings": False, "vision_config": {"depth": 27},
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
            "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
            "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16, "full_attention_interval": 4,
            "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1, "attention_bias": False, "rope_parameters": _MROPE,
        },
    },
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {"depth": 27},
        "text_config": {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "linear_num_value_heads": 32,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144, "rope_parameters": _MROPE,
        },
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": {"model_type": "qwen3_5_text", "max_position_embeddings": 262144, "rope_parameters": _MROPE},
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "head_dim": 256, "hidden_size": 3584, "intermediate_size": 14336, "vocab_size": 256000,
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "vision_config": {"hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
        },
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "ministral-3-8b": {
        "model_type": "mistral3", "tie_word_embeddings": False, "vision_config": {"model_type": "pixtral"},
        "text_config": {
            "model_type": "ministral3", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
            "max_position_embeddings": 262144, "sliding_window": None, "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    },
    "muse-glimmer-30b": {
        "model_type": "muse_glimmer", "vision_config": {"model_type": "muse_glimmer_vision"},
        "text_config": {
            "model_type": "muse_glimmer_text", "hidden_size": 6656, "num_hidden_layers": 52,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 13,
        },
    },
    "phi-3-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096,
        "sliding_window": 2047, "tie_word_embeddings": False, "attention_bias": False,
    },
    "seed-oss-36b": {
        "model_type": "seed_oss", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155136,
        "attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "max_position_embeddings": 524288,
        "tie_word_embeddings": False, "rope_theta": 10000000.0, "rope_scaling": {"rope_type": "default"},
    },
    "smollm3-3b": {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 65536,
        "use_sliding_window": False, "sliding_window": None, "attention_bias": False, "mlp_bias": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088,
        "num_attention_heads": 64, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "num_experts_per_tok": 4, "experts_per_token": 4, "attention_bias": True, "sliding_window": 128,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
}  # fmt: skip
