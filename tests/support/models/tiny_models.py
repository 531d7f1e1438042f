"""Tiny random models of every family, each with the oddities of its family turned up until they show.

No two dimensions are alike, windows and pretraining contexts are shorter than the text, and weights are large
enough that attention is far from uniform. `without` names what a wrong implementation would leave out: the tests
check that leaving it out is seen.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localq.engine.cache import KVCache
from localq.models import ARCHITECTURES
from localq.models.config import DecoderConfig
from localq.models.decoder import Decoder
from tests.support.models.tiny_checkpoints import WITH_IMAGES

CONTEXT = 64  # slots of the cache and of the tables
PREFILL = (16, 7)  # the uneven pieces of the prompt
STEPS = 32  # cached decode steps after it
TOKENS = sum(PREFILL) + STEPS

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
}
HEAD = {"head_dim": 14}  # 6 * 14 = 84 is not hidden
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 10,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


MUSE_LAST = "model.language_model.norm.weight"
MUSE_VISION = {
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "patch_size": 4,
    "pos_emb_height": 2,
    "pos_emb_width": 2,
}


@dataclass(frozen=True)
class Case:
    """A configuration in the form of `config.json`, and what to take from it so that the logits must change."""

    name: str
    config: dict[str, Any]
    without: Callable[[DecoderConfig], dict[str, Any]]


def _case(name: str, model_type: str, without: Callable[[DecoderConfig], dict[str, Any]], **config: Any) -> Case:
    return Case(name, {"model_type": model_type, **SHAPE, **config}, without)


def _no_windows(config: DecoderConfig) -> dict[str, Any]:
    assert any(config.windows)
    return {"windows": (0,) * config.layers}


def _plain_ropes(config: DecoderConfig) -> dict[str, Any]:
    ropes = [rope and replace(rope, kind="default", attention_factor=1.0) for rope in config.ropes]
    assert tuple(ropes) != config.ropes
    return {"ropes": tuple(ropes)}


def _one_rope(config: DecoderConfig) -> dict[str, Any]:
    assert len(set(config.ropes)) == 2
    return {"ropes": (config.rope_kinds[0],) * config.layers}


def _whole_heads_turn(config: DecoderConfig) -> dict[str, Any]:
    assert all(rope and rope.rotary_dim < config.head_dim for rope in config.ropes)
    return {"ropes": tuple(rope and replace(rope, rotary_dim=config.head_dim) for rope in config.ropes)}


def _swap_lists(config: DecoderConfig) -> dict[str, Any]:
    swapped = [rope and replace(rope, short_factor=rope.long_factor, long_factor=rope.short_factor)
               for rope in config.ropes]  # fmt: skip
    return {"ropes": tuple(swapped)}


def _truncated(config: DecoderConfig) -> dict[str, Any]:
    assert not any(rope and rope.truncate for rope in config.ropes)
    return {"ropes": tuple(rope and replace(rope, truncate=True) for rope in config.ropes)}


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
_GROWING = {"type": "yarn", "rope_type": "yarn", "rope_theta": 1000.0, "factor": 6.0, "beta_fast": 3.0,
            "original_max_position_embeddings": 13, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.6}  # fmt: skip


def _wrapped(name: str, text_type: str, without: Callable[[DecoderConfig], dict[str, Any]], **config: Any) -> Case:
    """A mistral3 around a text model; its files state at two places whether the embedding is the head."""
    tied = {key: config.pop(key) for key in ("tie_word_embeddings",) if key in config}
    text = {"model_type": text_type, **SHAPE, **HEAD, **config}
    return Case(name, {"model_type": "mistral3", "vision_config": PIXTRAL, "text_config": text, **tied}, without)


CASES = (
    _case("llama-biases", "llama", lambda c: {"qkv_bias": False}, **HEAD, attention_bias=True, mlp_bias=True),
    _case("llama-llama3-tied", "llama", _plain_ropes, tie_word_embeddings=True, rope_theta=500.0, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}),
    _case("llama-linear", "llama", _plain_ropes, rope_scaling={"type": "linear", "factor": 4.0}),
    _case("llama-yarn", "llama", _plain_ropes, **HEAD, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 20,
        "beta_fast": 3.0}),
    _case("mistral-window", "mistral", _no_windows, sliding_window=9),
    _case("mistral-head-dim", "mistral", lambda c: {"attention_scale": 12**-0.5}, **HEAD, sliding_window=None),
    _case("ministral3", "ministral3", lambda c: {"query_growth": 0.0}, **HEAD, rope_parameters=_GROWING),
    _case("ministral3-period", "ministral3", lambda c: {"query_period": 14}, **HEAD, tie_word_embeddings=True,
          sliding_window=9, rope_parameters=_GROWING),
    _wrapped("mistral3-ministral3", "ministral3", _plain_ropes, tie_word_embeddings=False, rope_parameters=_GROWING),
    _wrapped("mistral3-mistral", "mistral", _no_windows, tie_word_embeddings=True, sliding_window=11, rope_theta=500.0),
    Case("muse-glimmer", {
        "model_type": "muse_glimmer", "vision_config": MUSE_VISION, "text_config": {
            "model_type": "muse_glimmer_text", **SHAPE, **HEAD, "sliding_window": 9, "qk_scale_factor": 1.7,
            "output_multiplier": 0.4, "final_logit_softcapping": 3.0, "post_norm_eps": 0.3}},
         lambda c: {"query_factor": 1.0}),
    _case("muse-glimmer-tied", "muse_glimmer_text", lambda c: {"logit_factor": 1.0}, **HEAD, sliding_window=7,
          tie_word_embeddings=True, attention_bias=True, output_multiplier=0.5, rope_parameters={
              "rope_type": "default", "rope_theta": 300.0}),
    _case("muse-glimmer-windows", "muse_glimmer_text", _no_windows, **HEAD, sliding_window=11, num_hidden_layers=6,
          output_multiplier=0.6, final_logit_softcapping=5.0),
    _case("muse-glimmer-eps", "muse_glimmer_text", lambda c: {"post_eps": c.eps}, **HEAD, sliding_window=5,
          output_multiplier=0.6, post_norm_eps=0.5),
    _case("muse-glimmer-turns", "muse_glimmer_text", lambda c: {"ropes": (c.rope_kinds[0],) * c.layers}, **HEAD,
          sliding_window=8, output_multiplier=0.6, layer_rope_theta=[0, 700.0, 0, 700.0, 700.0], layer_types=[
              "sliding_attention", "full_attention", "full_attention", "sliding_attention", "sliding_attention"],
          rope_parameters={"rope_type": "default", "rope_theta": 700.0}),
    _case("mixtral-window", "mixtral", _no_windows, sliding_window=9, num_local_experts=5, num_experts_per_tok=2),
    _case("mixtral-tied", "mixtral", lambda c: {"experts_active": 1}, **HEAD, tie_word_embeddings=True,
          num_local_experts=3, num_experts_per_tok=2, rope_theta=500.0),
    _case("qwen2-upper-windows", "qwen2", _no_windows, tie_word_embeddings=True, use_sliding_window=True,
          sliding_window=7, max_window_layers=2, rope_theta=1e6),
    _case("qwen2-inert-window", "qwen2", lambda c: {"qkv_bias": False}, use_sliding_window=False, sliding_window=7),
    _case("qwen3", "qwen3", lambda c: {"qk_norm": False}, **HEAD, tie_word_embeddings=True),
    _case("qwen3-yarn", "qwen3", _plain_ropes, **HEAD, attention_bias=True, rope_scaling={
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 24, "attention_factor": 1.3}),
    _case("qwen3-moe", "qwen3_moe", lambda c: {"routing": "softmax_of_all"}, **HEAD, **_EXPERTS, norm_topk_prob=True),
    _case("qwen3-moe-all", "qwen3_moe", lambda c: {"routing": "softmax_of_chosen"}, **HEAD, **_EXPERTS,
          tie_word_embeddings=True),
    _case("qwen3-moe-dense-layers", "qwen3_moe", _no_windows, **HEAD, **_EXPERTS, attention_bias=True,
          decoder_sparse_step=2, mlp_only_layers=[3], use_sliding_window=True, sliding_window=9),
    _case("qwen3-moe-no-experts", "qwen3_moe", lambda c: {"qk_norm": False}, **HEAD, **_EXPERTS,
          mlp_only_layers=[0, 1, 2, 3, 4]),
    _case("gemma2", "gemma2", lambda c: {"attention_softcap": 0.0}, **HEAD, sliding_window=8,
          query_pre_attn_scalar=20, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    _case("gemma2-windows", "gemma2", _no_windows, **HEAD, sliding_window=11, query_pre_attn_scalar=9,
          attn_logit_softcapping=6.0, final_logit_softcapping=None, tie_word_embeddings=False),
    _case("gemma3-text", "gemma3_text", _no_windows, **HEAD, num_hidden_layers=7, sliding_window=8,
          query_pre_attn_scalar=20, rope_parameters={
              "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
              "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}),
    Case("gemma3-vision", {
        "model_type": "gemma3", "vision_config": VISION, "mm_tokens_per_image": 4, "text_config": {
            "model_type": "gemma3_text", **SHAPE, **HEAD, "num_hidden_layers": 7, "sliding_window": 10,
            "query_pre_attn_scalar": 20, "rope_theta": 1e5, "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}, _one_rope),
    _case("phi3-window", "phi3", _no_windows, hidden_size=96, sliding_window=12),
    _case("phi3-longrope-long", "phi3", _swap_lists, original_max_position_embeddings=32, rope_scaling=_LONG),
    _case("phi3-longrope-short", "phi3", _swap_lists, hidden_size=96, tie_word_embeddings=True,
          partial_rotary_factor=0.75, max_position_embeddings=256, original_max_position_embeddings=64,
          rope_scaling=_LONG),
    _case("smollm3", "smollm3", lambda c: {"ropes": (c.ropes[0],) * c.layers}, tie_word_embeddings=True,
          rope_theta=5000.0),
    _case("smollm3-biases-windows", "smollm3", _no_windows, attention_bias=True, mlp_bias=True,
          tie_word_embeddings=False, no_rope_layers=[1, 0, 1, 1, 0], use_sliding_window=True, sliding_window=9),
    Case("qwen3.5", {"model_type": "qwen3_5_text", **_HYBRID, "attention_bias": True}, _whole_heads_turn),
    Case("qwen3.5-vision", {
        "model_type": "qwen3_5", "vision_config": _TOWER, "tie_word_embeddings": True, "text_config": {
            "model_type": "qwen3_5_text", **_HYBRID, "tie_word_embeddings": True, "full_attention_interval": 2,
            "linear_conv_kernel_dim": 3, "linear_num_key_heads": 1, "rope_parameters": _HYBRID_YARN}}, _plain_ropes),
    Case("qwen3.5-moe", {"model_type": "qwen3_5_moe_text", **_HYBRID, **_SHARED},
         lambda c: {"routing": "softmax_of_all"}),
    Case("qwen3.5-moe-vision", {
        "model_type": "qwen3_5_moe", "vision_config": _TOWER, "text_config": {
            "model_type": "qwen3_5_moe_text", **_HYBRID, **_SHARED, "layer_types": [
                "full_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"]}},
         lambda c: {"qk_norm": False}),
    _case("gpt-oss-sinks", "gpt_oss", lambda c: {"sinks": False}, **_MIXTURE),
    _case("gpt-oss-windows", "gpt_oss", _no_windows, **_MIXTURE),
    _case("gpt-oss-yarn", "gpt_oss", _truncated, **_MIXTURE, attention_bias=False, tie_word_embeddings=True),
    _case("gpt-oss-clamps", "gpt_oss", lambda c: {"swiglu_limit": 1e9}, **_MIXTURE, swiglu_limit=1.0),
    _case("gpt-oss-gates", "gpt_oss", lambda c: {"swiglu_alpha": 1.0}, **{**_MIXTURE, "num_experts_per_tok": 4}),
    _case("gpt-oss-defaults", "gpt_oss", lambda c: {"experts_active": 1}, num_local_experts=3, num_experts_per_tok=3,
          head_dim=12),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
DENSE = {  # one MLP a layer
    name: case
    for name, case in BY_NAME.items()
    if not {"num_local_experts", "num_experts"} & case.config.get("text_config", case.config).keys()
}


def token_ids() -> Tensor:
    """The text of all comparisons, int64 [TOKENS]."""
    return torch.randint(3, SHAPE["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(5))


def reference_config(case: Case) -> Any:
    """The transformers configuration of `case`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**copy.deepcopy(case.config))  # it writes into the dicts that it is given


def _wrapped_reference(config: Any) -> Any:
    """`config`, in the wrapper without which transformers does not run it."""
    from transformers import AutoConfig

    if config.model_type != "muse_glimmer_text":
        return config
    tied = config.tie_word_embeddings
    text = config.to_dict()
    return AutoConfig.for_model("muse_glimmer", text_config=text, vision_config=MUSE_VISION, tie_word_embeddings=tied)


def reference(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of `case`, with the same weights at every call, rounded to bf16."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = _wrapped_reference(reference_config(case))
    config._experts_implementation = "eager"  # the others want rows of whole 16 bytes
    auto_class = AutoModelForImageTextToText if config.model_type in WITH_IMAGES else AutoModelForCausalLM
    model = auto_class.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    generator = torch.Generator().manual_seed(11)
    from_zero = case.config["model_type"].startswith(("gemma", "qwen3_5", "muse"))  # norms multiply by 1 + weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                plain = not from_zero or name.endswith(("linear_attn.norm.weight", MUSE_LAST))
                weights = (1.0 if plain else 0.0) + 0.3 * weights
            elif "embed" in name:
                weights *= 0.2
            elif name.endswith("A_log"):  # a memory of some ten tokens
                weights -= 2.0
            elif parameter.ndim > 1:
                weights *= 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(weights.bfloat16())
    return model


@functools.cache
def reference_logits(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of the whole text at once, without a cache, f32 [TOKENS, vocab]."""
    with torch.no_grad():
        logits: Tensor = reference(BY_NAME[name], dtype)(token_ids()[None], use_cache=False).logits[0].float()
    return logits


def load(config: DecoderConfig, case: Case, weights: dict[str, Tensor], strict: bool = True) -> Decoder:
    """Our model of `config` with the weights of a transformers state dict, through `rename`."""
    module = ARCHITECTURES[case.config["model_type"]]
    named = {module.rename(key): tensor for key, tensor in weights.items()}
    with torch.device("meta"):
        model: Decoder = module.Model(config)
    kept = {name: tensor for name, tensor in named.items() if name is not None and name not in model.redundant}
    kept |= {name: kept[name].mT.contiguous() for name in model.transposed & kept.keys()}
    model.load_state_dict(kept, assign=True, strict=strict)
    model.make_tables(CONTEXT, "cpu")
    return model.eval()


def built(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model of the case `name`, with the weights of `reference`."""
    case = BY_NAME[name]
    config = ARCHITECTURES[case.config["model_type"]].Config.from_dict(case.config)
    return load(config, case, reference(case, dtype).state_dict())


@functools.cache
def ours(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """`built`, once; not to be changed."""
    return built(name, dtype)


def logits_in_steps(model: Decoder, live: Callable[[int], int] = lambda stop: stop) -> Tensor:
    """Logits of the text from a prefill in pieces and cached single steps, f32 [TOKENS, vocab].

    `live(stop)` is what the model is told for tokens up to position stop - 1.
    """
    ids, parts, start = token_ids(), [], 0
    cache = KVCache(model.cache_layout(), CONTEXT, model.norm.weight.dtype, "cpu")
    with torch.inference_mode():
        for count in (*PREFILL, *(1,) * STEPS):
            stop = start + count
            logits = model(ids[start:stop], torch.arange(start, stop), cache, live(stop), last_only=False)
            assert logits.dtype == torch.float32
            parts.append(logits)
            start = stop
    return torch.cat(parts)
