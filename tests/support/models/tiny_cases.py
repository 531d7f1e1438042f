"""The tiny models of every family (`CASES`), each with the oddities of its family turned up until they show.

No two dimensions are alike, and windows and pretraining contexts are shorter than the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localq.models.config import DecoderConfig
from tests.support.models.tiny_case import (
    HEAD,
    MUSE_TOWER,
    PIXTRAL,
    QWEN_TOWER,
    SHAPE,
    VISION,
    Case,
    all_pairs_turn,
    case_of,
    no_windows,
    one_rope,
    plain_ropes,
    swap_lists,
    truncated,
    whole_heads_turn,
)

_MIXTURE = {**HEAD, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "rope_theta": 1000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20,
                             "beta_fast": 3.0, "truncate": False}}  # fmt: skip
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
_HYBRID = {  # all dimensions differ; 3 value heads share a key head, and 4 of 16 columns of a head turn
    **SHAPE,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 22,
    "linear_value_head_dim": 18,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_HYBRID_YARN = {**_HYBRID["rope_parameters"], "rope_type": "yarn", "factor": 4.0, "beta_fast": 3.0,
                "original_max_position_embeddings": 20}  # fmt: skip
_SHARED = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
           "shared_expert_intermediate_size": 52}  # fmt: skip
_TOWER = {"depth": 1, "hidden_size": 12, "num_heads": 1, "intermediate_size": 12, "out_hidden_size": 72,
          "patch_size": 4, "num_position_embeddings": 16}  # fmt: skip
_LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.9],
    "long_factor": [1.2, 2.0, 3.5, 5.0, 7.0, 8.0],
}
_GEMMA4 = {  # layers without a window: 3 of 6 heads have keys of their own, of 20 columns, of which 4 turn
    **SHAPE, "head_dim": 14, "num_key_value_heads": 2, "global_head_dim": 20, "num_global_key_value_heads": 3,
    "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2, "sliding_window": 9,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100.0},
    },
}  # fmt: skip
GEMMA4_TOWERS: dict[str, dict[str, Any]] = {
    "gemma4": {"vision_config": {
        "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
    }},
    "gemma4_unified": {"vision_config": {
        "patch_size": 2, "mm_embed_dim": 8, "mm_posemb_size": 4, "output_proj_dims": 8, "pooling_kernel_size": 2,
    }, "audio_config": {"audio_embed_dim": 8}},
}  # fmt: skip
_LFM2 = {"block_multiple_of": 4, "block_ffn_dim_multiplier": 1.2, "norm_eps": 1e-3}
_CONVOLVED = ("conv", "full_attention", "conv", "conv", "full_attention")
_FACTORS = {"embedding_multiplier": 7.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
            "logits_scaling": 1.7}  # fmt: skip
_OLMO_YARN = {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0, "original_max_position_embeddings": 20,
              "beta_fast": 3.0, "attention_factor": 1.3}  # fmt: skip
_GROWING = {"type": "yarn", "rope_type": "yarn", "rope_theta": 1000.0, "factor": 6.0, "beta_fast": 3.0,
            "original_max_position_embeddings": 13, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.6}  # fmt: skip

# All dimensions differ; 3 heads of a Mamba-2 share a group; steps have no lower limit, which only chunks have there.
_NEMOTRON = {
    **{key: value for key, value in SHAPE.items() if key != "num_hidden_layers"},
    "head_dim": 14, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 2,
    "ssm_state_size": 12, "conv_kernel": 4, "chunk_size": 16, "time_step_min": 1e-30, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 44, "moe_shared_expert_intermediate_size": 52,
    "routed_scaling_factor": 2.5, "layers_block_type": [
        "linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe", "full_attention"],
}  # fmt: skip
_GRANITE = {  # all dimensions differ; 3 heads of a Mamba-2 share a group
    **SHAPE, "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16,
    "shared_intermediate_size": 52, "intermediate_size": 44, "num_local_experts": 5, "num_experts_per_tok": 2,
    "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.7,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_COHERE = {  # experts are 92 wide, their shared one 184, and dense MLPs 60
    **{key: value for key, value in SHAPE.items() if key != "rms_norm_eps"}, **HEAD, "sliding_window": 9,
    "layer_norm_eps": 1e-3, "rope_theta": 300.0, "num_experts": 5, "num_experts_per_tok": 3, "num_shared_experts": 2,
    "prefix_dense_intermediate_size": 60, "logit_scale": 0.7, "intermediate_size": 92,
}  # fmt: skip
_LAGUNA = {  # windowed layers have 8 heads, the others 6, of which half of the columns turn
    **SHAPE, "head_dim": 16, "sliding_window": 9, "num_attention_heads_per_layer": [6, 8, 8, 6, 8],
    "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 44, "shared_expert_intermediate_size": 52,
    "moe_routed_scaling_factor": 2.5, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "factor": 4.0,
                           "beta_fast": 3.0, "original_max_position_embeddings": 20, "attention_factor": 1.3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


_GLM = {  # heads of 15 columns, of which the last 6 turn, values of 11; latents of 26 and, for queries, 34
    **SHAPE, "num_key_value_heads": 6, "kv_lora_rank": 26, "q_lora_rank": 34, "qk_nope_head_dim": 9,
    "qk_rope_head_dim": 6, "v_head_dim": 11, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 44, "rope_theta": 300.0,
}  # fmt: skip
_GLM_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 20,
             "beta_fast": 3.0, "mscale": 0.7, "mscale_all_dim": 1.6}  # fmt: skip


def _glm(name: str, without: Callable[[DecoderConfig], dict[str, Any]], **config: Any) -> Case:
    return Case(name, {"model_type": "glm4_moe_lite", **_GLM, **config}, without)


def _latents(**changes: Any) -> Callable[[Any], dict[str, Any]]:
    """What changes in the sizes and facts of latent attention."""
    return lambda config: {"latents": replace(config.latents, **changes)}


def _gemma4(name: str, wrapper: str, without: Callable[[DecoderConfig], dict[str, Any]], **config: Any) -> Case:
    """The wrapper `wrapper` around its text model."""
    text = {"model_type": f"{wrapper}_text", **_GEMMA4, **config}
    return Case(name, {"model_type": wrapper, **GEMMA4_TOWERS[wrapper], "text_config": text}, without)


def _wrapped(name: str, text_type: str, without: Callable[[DecoderConfig], dict[str, Any]], **config: Any) -> Case:
    """A mistral3 around a text model; its files state at two places whether the embedding is the head."""
    tied = {key: config.pop(key) for key in ("tie_word_embeddings",) if key in config}
    text = {"model_type": text_type, **SHAPE, **HEAD, **config}
    return Case(name, {"model_type": "mistral3", "vision_config": PIXTRAL, "text_config": text, **tied}, without)


CASES = (
    case_of("llama-biases", "llama", lambda c: {"qkv_bias": False}, **HEAD, attention_bias=True, mlp_bias=True),
    case_of("llama-llama3-tied", "llama", plain_ropes, tie_word_embeddings=True, rope_theta=500.0, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}),
    case_of("llama-linear", "llama", plain_ropes, rope_scaling={"type": "linear", "factor": 4.0}),
    case_of("llama-yarn", "llama", plain_ropes, **HEAD, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 20,
        "beta_fast": 3.0}),
    case_of("mistral-window", "mistral", no_windows, sliding_window=9),
    case_of("mistral-head-dim", "mistral", lambda c: {"attention_scale": 12**-0.5}, **HEAD, sliding_window=None),
    case_of("ministral3", "ministral3", lambda c: {"query_growth": 0.0}, **HEAD, rope_parameters=_GROWING),
    case_of("ministral3-period", "ministral3", lambda c: {"query_period": 14}, **HEAD, tie_word_embeddings=True,
          sliding_window=9, rope_parameters=_GROWING),
    _wrapped("mistral3-ministral3", "ministral3", plain_ropes, tie_word_embeddings=False, rope_parameters=_GROWING),
    _wrapped("mistral3-mistral", "mistral", no_windows, tie_word_embeddings=True, sliding_window=11, rope_theta=500.0),
    Case("muse-glimmer", {
        "model_type": "muse_glimmer", **MUSE_TOWER, "text_config": {
            "model_type": "muse_glimmer_text", **SHAPE, **HEAD, "sliding_window": 9, "qk_scale_factor": 1.7,
            "output_multiplier": 0.4, "final_logit_softcapping": 3.0, "post_norm_eps": 0.3}},
         lambda c: {"query_factor": 1.0}),
    case_of("muse-glimmer-tied", "muse_glimmer_text", lambda c: {"logit_factor": 1.0}, **HEAD, sliding_window=7,
          tie_word_embeddings=True, attention_bias=True, output_multiplier=0.5, rope_parameters={
              "rope_type": "default", "rope_theta": 300.0}),
    case_of("muse-glimmer-windows", "muse_glimmer_text", no_windows, **HEAD, sliding_window=11, num_hidden_layers=6,
          output_multiplier=0.6, final_logit_softcapping=5.0),
    case_of("muse-glimmer-eps", "muse_glimmer_text", lambda c: {"post_eps": c.eps}, **HEAD, sliding_window=5,
          output_multiplier=0.6, post_norm_eps=0.5),
    case_of("muse-glimmer-turns", "muse_glimmer_text", lambda c: {"ropes": (c.rope_kinds[0],) * c.layers}, **HEAD,
          sliding_window=8, output_multiplier=0.6, layer_rope_theta=[0, 700.0, 0, 700.0, 700.0], layer_types=[
              "sliding_attention", "full_attention", "full_attention", "sliding_attention", "sliding_attention"],
          rope_parameters={"rope_type": "default", "rope_theta": 700.0}),
    case_of("mixtral-window", "mixtral", no_windows, sliding_window=9, num_local_experts=5, num_experts_per_tok=2),
    case_of("mixtral-tied", "mixtral", lambda c: {"experts_active": 1}, **HEAD, tie_word_embeddings=True,
          num_local_experts=3, num_experts_per_tok=2, rope_theta=500.0),
    case_of("qwen2-upper-windows", "qwen2", no_windows, tie_word_embeddings=True, use_sliding_window=True,
          sliding_window=7, max_window_layers=2, rope_theta=1e6),
    case_of("qwen2-inert-window", "qwen2", lambda c: {"qkv_bias": False}, use_sliding_window=False, sliding_window=7),
    case_of("qwen3", "qwen3", lambda c: {"qk_norm": False}, **HEAD, tie_word_embeddings=True),
    case_of("qwen3-yarn", "qwen3", plain_ropes, **HEAD, attention_bias=True, rope_scaling={
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 24, "attention_factor": 1.3}),
    case_of("qwen3-moe", "qwen3_moe", lambda c: {"routing": "softmax_of_all"}, **HEAD, **_EXPERTS, norm_topk_prob=True),
    case_of("qwen3-moe-all", "qwen3_moe", lambda c: {"routing": "softmax_of_chosen"}, **HEAD, **_EXPERTS,
          tie_word_embeddings=True),
    case_of("qwen3-moe-dense-layers", "qwen3_moe", no_windows, **HEAD, **_EXPERTS, attention_bias=True,
          decoder_sparse_step=2, mlp_only_layers=[3], use_sliding_window=True, sliding_window=9),
    case_of("qwen3-moe-no-experts", "qwen3_moe", lambda c: {"qk_norm": False}, **HEAD, **_EXPERTS,
          mlp_only_layers=[0, 1, 2, 3, 4]),
    case_of("gemma2", "gemma2", lambda c: {"attention_softcap": 0.0}, **HEAD, sliding_window=8,
          query_pre_attn_scalar=20, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    case_of("gemma2-windows", "gemma2", no_windows, **HEAD, sliding_window=11, query_pre_attn_scalar=9,
          attn_logit_softcapping=6.0, final_logit_softcapping=None, tie_word_embeddings=False),
    case_of("gemma3-text", "gemma3_text", no_windows, **HEAD, num_hidden_layers=7, sliding_window=8,
          query_pre_attn_scalar=20, rope_parameters={
              "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
              "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}),
    Case("gemma3-vision", {
        "model_type": "gemma3", "vision_config": VISION, "mm_tokens_per_image": 4, "text_config": {
            "model_type": "gemma3_text", **SHAPE, **HEAD, "num_hidden_layers": 7, "sliding_window": 10,
            "query_pre_attn_scalar": 20, "rope_theta": 1e5, "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}, one_rope),
    Case("gemma4", {"model_type": "gemma4_text", **_GEMMA4, "attention_k_eq_v": True}, one_rope),
    Case("gemma4-unified", {"model_type": "gemma4_unified_text", **_GEMMA4, "attention_k_eq_v": True,
                            "num_global_key_value_heads": 1, "attention_bias": True}, no_windows),
    Case("gemma4-values", {"model_type": "gemma4_text", **_GEMMA4, "final_logit_softcapping": None,
                           "tie_word_embeddings": False}, lambda c: {"attention_scale": 0.25}),
    Case("gemma4-turns", {"model_type": "gemma4_text", **_GEMMA4, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 100.0,
                           "factor": 2.0}}}, all_pairs_turn),
    Case("gemma4-shared", {"model_type": "gemma4_unified_text", **_GEMMA4, "num_kv_shared_layers": 3,
                           "use_double_wide_mlp": True, "attention_k_eq_v": True}, one_rope),
    Case("gemma4-inputs", {"model_type": "gemma4_text", **_GEMMA4, "hidden_size_per_layer_input": 10,
                           "vocab_size_per_layer_input": 140}, no_windows),
    Case("gemma4-experts", {"model_type": "gemma4_text", **_GEMMA4, "attention_k_eq_v": True, "enable_moe_block": True,
                            "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 44},
         lambda c: {"experts_active": 1}),
    _gemma4("gemma4-small", "gemma4", lambda c: {"attention_scale": 0.25}, num_kv_shared_layers=2,
            hidden_size_per_layer_input=12, vocab_size_per_layer_input=131, use_double_wide_mlp=True),
    _gemma4("gemma4-vision", "gemma4", lambda c: {"attention_scale": 0.25}, use_bidirectional_attention="vision"),
    _gemma4("gemma4-unified-vision", "gemma4_unified", no_windows, attention_k_eq_v=True),
    case_of("exaone4", "exaone4", no_windows, **HEAD, sliding_window=9, rope_theta=500.0),
    case_of("exaone4-turns", "exaone4", lambda c: {"ropes": (c.rope_kinds[0],) * c.layers}, sliding_window=50,
          sliding_window_pattern="LG", rope_theta=300.0, rope_scaling={
              "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32},
          layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"]),
    case_of("exaone4-small", "exaone4", lambda c: {"qk_norm": False}, **HEAD, sliding_window=None,
          tie_word_embeddings=True, layer_types=["full_attention"] * 5),
    case_of("granite", "granite", lambda c: {"embedding_factor": 1.0}, **HEAD, **_FACTORS, tie_word_embeddings=True),
    case_of("granite-logits", "granite", lambda c: {"logit_factor": 1.0}, **_FACTORS, rope_theta=500.0),
    case_of("granite-eps", "granite", lambda c: {"eps": 0.02}, **{**HEAD, **_FACTORS, "rms_norm_eps": 0.02},
          attention_bias=True, mlp_bias=True),
    case_of("granite-attention", "granite", lambda c: {"attention_scale": 14**-0.5}, **HEAD, **_FACTORS),
    case_of("lfm2", "lfm2", lambda c: {"qk_norm": False}, **_LFM2, layer_types=[*_CONVOLVED], rope_theta=500.0),
    case_of("lfm2-conv", "lfm2", lambda c: {"convolution": replace(c.convolution, bias=False)}, **_LFM2, conv_bias=True,
          conv_L_cache=4, tie_word_embeddings=False, full_attn_idxs=[1, 4]),
    case_of("lfm2-moe", "lfm2_moe", lambda c: {"selection_bias": False}, **_LFM2, **_EXPERTS, num_dense_layers=2,
          layer_types=[*_CONVOLVED], routed_scaling_factor=1.7),
    case_of("lfm2-moe-plain", "lfm2_moe", lambda c: {"normed": True}, **_LFM2, **_EXPERTS, num_dense_layers=1,
          layer_types=["full_attention", *_CONVOLVED[1:]], use_expert_bias=False, norm_topk_prob=False),
    case_of("olmo2", "olmo2", lambda c: {"ropes": (replace(c.ropes[0], theta=500.0),) * c.layers}, **HEAD),
    case_of("olmo2-yarn", "olmo2", plain_ropes, attention_bias=True, tie_word_embeddings=True,
          rope_parameters=_OLMO_YARN),
    case_of("olmo3", "olmo3", plain_ropes, sliding_window=9, rope_parameters={
        "full_attention": _OLMO_YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}),
    case_of("olmo3-windows", "olmo3", no_windows, **HEAD, sliding_window=7, tie_word_embeddings=True,
          attention_bias=True, layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"]),
    case_of("olmo3-ropes", "olmo3", one_rope, **HEAD, sliding_window=60, rope_theta=500_000.0,
          rope_scaling=_OLMO_YARN),
    Case("granite-hybrid", {"model_type": "granitemoehybrid", **_GRANITE}, lambda c: {"stream_factor": 1.0}),
    Case("granite-hybrid-dense", {
        "model_type": "granitemoehybrid", **_GRANITE, "num_local_experts": 0, "tie_word_embeddings": True,
        "mamba_d_conv": 3, "mamba_d_head": "auto", "attention_bias": True}, lambda c: {"logit_factor": 1.0}),
    Case("granite-turning", {
        "model_type": "granitemoehybrid", **_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope",
        "rope_theta": 300.0, "layer_types": ["attention"] * 5}, lambda c: {"ropes": (None,) * c.layers}),
    Case("granite-hybrid-embedding", {
        "model_type": "granitemoehybrid", **_GRANITE, "layer_types": ["mamba"] * 4 + ["attention"]},
         lambda c: {"experts_active": 1}),
    Case("cohere2-moe", {"model_type": "cohere2_moe", **_COHERE}, lambda c: {"logit_factor": 1.0}),
    Case("cohere2-moe-dense", {
        "model_type": "cohere2_moe", **_COHERE, "first_k_dense_replace": 2, "expert_selection_fn": "sigmoid",
        "shared_expert_combination_strategy": "sum", "sliding_window_pattern": 2, "num_shared_experts": 1,
        "attention_bias": True}, lambda c: {"normalized": False}),
    Case("cohere2-moe-prefix", {
        "model_type": "cohere2_moe", **_COHERE, "first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2,
        "expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0,
        "prefix_dense_intermediate_size": None, "tie_word_embeddings": False, "num_key_value_heads": None},
         lambda c: {"ropes": (c.rope_kinds[0],) * c.layers}),
    Case("cohere2-moe-averaged", {"model_type": "cohere2_moe", **_COHERE}, lambda c: {"averaged": False}),
    Case("cohere2-moe-norms", {"model_type": "cohere2_moe", **_COHERE}, lambda c: {"centered": False}),
    Case("cohere2-moe-rms", {
        "model_type": "cohere2_moe", **_COHERE, "rms_norm_eps": 1e-2,
        "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense"],
        "layer_types": ["full_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 3.0,
                            "original_max_position_embeddings": 20}}, plain_ropes),
    Case("laguna", {"model_type": "laguna", **_LAGUNA}, lambda c: {"expert_factor": 1.0}),
    Case("laguna-windows", {
        "model_type": "laguna", **_LAGUNA, "mlp_layer_types": ["dense", "dense", "sparse", "dense", "sparse"],
        "attention_bias": True, "tie_word_embeddings": True}, lambda c: {"attention_scale": 1.0}),
    Case("laguna-turns", {"model_type": "laguna", **_LAGUNA}, one_rope),
    _glm("glm4-lite", _latents(neighbours=False)),
    _glm("glm4-lite-eps", _latents(eps=0.3), rms_norm_eps=0.3),
    _glm("glm4-lite-halves", _latents(neighbours=True), rope_interleave=False, q_lora_rank=None,
         tie_word_embeddings=True),
    _glm("glm4-lite-yarn", lambda c: {"attention_scale": 15**-0.5}, rope_parameters=_GLM_YARN, q_lora_rank=None),
    _glm("glm4-lite-turns", plain_ropes, rope_parameters=_GLM_YARN),
    _glm("glm4-lite-biases", lambda c: {"qkv_bias": False}, attention_bias=True,
         mlp_layer_types=["sparse", "dense", "sparse", "dense", "sparse"]),
    _glm("glm4-lite-groups", lambda c: {"active_groups": 3}, n_group=3, topk_group=2, n_shared_experts=2),
    _glm("glm4-lite-factor", lambda c: {"expert_factor": 1.0}),
    _glm("glm4-lite-weights", lambda c: {"normalized": True}, norm_topk_prob=False, num_experts_per_tok=3),
    _glm("glm4-lite-dense", lambda c: {"output_bias": False}, mlp_layer_types=["dense"] * 5, attention_bias=True),
    Case("nemotron-h", {"model_type": "nemotron_h", **_NEMOTRON}, lambda c: {"expert_factor": 1.0}),
    Case("nemotron-h-groups", {
        "model_type": "nemotron_h", **{key: value for key, value in _NEMOTRON.items() if key != "layers_block_type"},
        "hybrid_override_pattern": "EM*M-ME", "n_group": 3, "topk_group": 2, "conv_kernel": 3,
        "norm_topk_prob": False}, lambda c: {"active_groups": 3}),
    Case("nemotron-h-dense", {
        "model_type": "nemotron_h", **_NEMOTRON, "layers_block_type": ["mlp", "mamba", "attention", "mamba", "mlp"],
        "num_key_value_heads": 3}, lambda c: {"attention_scale": 1.0}),
    case_of("phi3-window", "phi3", no_windows, hidden_size=96, sliding_window=12),
    case_of("phi3-longrope-long", "phi3", swap_lists, original_max_position_embeddings=32, rope_scaling=_LONG),
    case_of("phi3-longrope-short", "phi3", swap_lists, hidden_size=96, tie_word_embeddings=True,
          partial_rotary_factor=0.75, max_position_embeddings=256, original_max_position_embeddings=64,
          rope_scaling=_LONG),
    Case("qwen3-vl", {
        "model_type": "qwen3_vl", **QWEN_TOWER, "tie_word_embeddings": True, "text_config": {
            "model_type": "qwen3_vl_text", **SHAPE, **HEAD, "rope_parameters": {
                "rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 2, 2], "mrope_interleaved": True}}},
         lambda c: {"qk_norm": False}),
    case_of("qwen3-vl-text", "qwen3_vl_text", lambda c: {"qkv_bias": False}, **HEAD, attention_bias=True,
          rope_parameters={"rope_type": "default", "rope_theta": 300.0, "mrope_section": [3, 2, 2]}),
    case_of("seed-oss", "seed_oss", lambda c: {"qkv_bias": False}, **HEAD, rope_theta=500.0),
    case_of("seed-oss-biases", "seed_oss", lambda c: {"output_bias": False}, **HEAD, attention_bias=False,
          attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=3),
    case_of("smollm3", "smollm3", lambda c: {"ropes": (c.ropes[0],) * c.layers}, tie_word_embeddings=True,
          rope_theta=5000.0),
    case_of("smollm3-biases-windows", "smollm3", no_windows, attention_bias=True, mlp_bias=True,
          tie_word_embeddings=False, no_rope_layers=[1, 0, 1, 1, 0], use_sliding_window=True, sliding_window=9),
    Case("qwen3.5", {"model_type": "qwen3_5_text", **_HYBRID, "attention_bias": True}, whole_heads_turn),
    Case("qwen3.5-vision", {
        "model_type": "qwen3_5", "vision_config": _TOWER, "tie_word_embeddings": True, "text_config": {
            "model_type": "qwen3_5_text", **_HYBRID, "tie_word_embeddings": True, "full_attention_interval": 2,
            "linear_conv_kernel_dim": 3, "linear_num_key_heads": 1, "rope_parameters": _HYBRID_YARN}}, plain_ropes),
    Case("qwen3.5-moe", {"model_type": "qwen3_5_moe_text", **_HYBRID, **_SHARED},
         lambda c: {"routing": "softmax_of_all"}),
    Case("qwen3.5-moe-vision", {
        "model_type": "qwen3_5_moe", "vision_config": _TOWER, "text_config": {
            "model_type": "qwen3_5_moe_text", **_HYBRID, **_SHARED, "layer_types": [
                "full_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"]}},
         lambda c: {"qk_norm": False}),
    case_of("gpt-oss-sinks", "gpt_oss", lambda c: {"sinks": False}, **_MIXTURE),
    case_of("gpt-oss-windows", "gpt_oss", no_windows, **_MIXTURE),
    case_of("gpt-oss-yarn", "gpt_oss", truncated, **_MIXTURE, attention_bias=False, tie_word_embeddings=True),
    case_of("gpt-oss-clamps", "gpt_oss", lambda c: {"swiglu_limit": 1e9}, **_MIXTURE, swiglu_limit=1.0),
    case_of("gpt-oss-gates", "gpt_oss", lambda c: {"swiglu_alpha": 1.0}, **{**_MIXTURE, "num_experts_per_tok": 4}),
    case_of("gpt-oss-defaults", "gpt_oss", lambda c: {"experts_active": 1}, num_local_experts=3, num_experts_per_tok=3,
          head_dim=12),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
UNFUSED = ("cohere2", "glm4_moe", "granitemoe", "laguna", "nemotron")
FUSED = [  # with kernels for all that a decode step computes
    name for name, case in BY_NAME.items() if not case.config["model_type"].startswith(UNFUSED)
]
TOGETHER = (
    "layers_block_type", "mamba_n_heads", "hybrid_override_pattern", "num_local_experts", "num_experts",
    "num_kv_shared_layers", "hidden_size_per_layer_input", "kv_lora_rank",
)  # fmt: skip
DENSE = {  # one MLP a layer, and nothing that layers share
    name: case
    for name, case in BY_NAME.items()
    if not any(case.config.get("text_config", case.config).get(key) for key in TOGETHER)
}
