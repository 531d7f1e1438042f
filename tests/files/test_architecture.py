"""`Architecture` against transformers' own parameter counts, and against config.json files in the forms that the hub
has: flat and nested, before and after transformers 5, with defaults left out."""

from __future__ import annotations

import pytest
import torch

from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.files.architecture import Architecture
from localq.files.model_types import MODEL_TYPES
from localq.models import ARCHITECTURES
from tests.support.files.hub_configs import HUB
from tests.support.models.tiny_case import TEXT_TOWERS

SHAPE = {
    "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 7, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 20, "vocab_size": 331, "max_position_embeddings": 640,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXTRAS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 72},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_5_text": {
        "attention_bias": True,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 5,
    },
    "qwen3_5_moe_text": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 72,
        "shared_expert_intermediate_size": 56,
        "full_attention_interval": 3,
    },
    "gemma4_text": {
        "global_head_dim": 36,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "attention_bias": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 350,
    },
    "gemma4_unified_text": {
        "global_head_dim": 28,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "layer_types": [*["full_attention", "sliding_attention"] * 3, "full_attention"],
    },
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "lfm2": {
        "layer_types": [*["conv"] * 4, "full_attention"] + ["conv"] * 2,
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_multiple_of": 8,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 3 + ["conv"],
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 72,
        "num_dense_layers": 3,
    },
    "granitemoehybrid": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"] + ["linear_attention"] * 3,
        "shared_intermediate_size": 56,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 3,
        "mamba_d_state": 10,
        "mamba_d_conv": 5,
        "attention_bias": True,
    },
    "cohere2_moe": {
        "mlp_layer_types": [*["dense", "sparse"] * 3, "sparse"],
        "prefix_dense_intermediate_size": 88,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "attention_bias": True,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 6,
        "head_dim": 8,  # another name of the next
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 14,
        "v_head_dim": 18,
        "kv_lora_rank": 26,
        "q_lora_rank": 34,
        "mlp_layer_types": [*["dense", "sparse"] * 3, "sparse"],
        "n_routed_experts": 5,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 72,
        "attention_bias": True,
    },
    "laguna": {
        "sliding_window": 96,
        "layer_types": [*["full_attention", "sliding_attention"] * 3, "sliding_attention"],
        "num_attention_heads_per_layer": [*[6, 9] * 3, 9],
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 72,
        "shared_expert_intermediate_size": 56,
        "attention_bias": True,
    },
    "nemotron_h": {
        "num_hidden_layers": None,
        "hybrid_override_pattern": "MEM*M-E*",
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 72,
        "moe_shared_expert_intermediate_size": 56,
        "mamba_num_heads": 6,
        "mamba_head_dim": 14,
        "n_groups": 3,
        "ssm_state_size": 10,
        "conv_kernel": 5,
    },
    "phi3": {"head_dim": 8},  # phi3 takes head_dim from hidden / heads
}
NEVER_TIED = ("nemotron_h",)  # whatever config.json says
WRAPPERS = {each for each in MODEL_TYPES if f"{each}_text" in MODEL_TYPES}
# Linears that stay in 16 bit: of gated delta nets, and of what layers of Gemma 4 add per token
RATES = (
    ".in_proj_a",
    ".in_proj_b",
    ".per_layer_input_gate",
    ".per_layer_projection",
    ".per_layer_model_projection",
    ".g_proj",
)


def reference(model_type: str, **fields):
    """transformers' configuration and the model of it, without memory for the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SHAPE, **EXTRAS.get(model_type, {}), **fields})
    with torch.device("meta"):
        if model_type in TEXT_TOWERS:  # transformers runs it in its wrapper only
            return config, _without_towers(config)
        return config, AutoModelForCausalLM.from_config(config)


def _without_towers(config):
    from transformers import AutoConfig, AutoModelForImageTextToText

    tied, name = getattr(config, "tie_word_embeddings", False), config.model_type.removesuffix("_text")
    wrapper = AutoConfig.for_model(name, text_config=config.to_dict(), tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(wrapper)
    for part in ("vision_tower", "vision_adapter", "vision_projection", "visual"):
        if hasattr(model.model, part):
            delattr(model.model, part)
    return model


@pytest.mark.parametrize("model_type", sorted(set(MODEL_TYPES) - WRAPPERS))
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_transformers_makes(model_type, tied):
    if tied and model_type in NEVER_TIED:
        pytest.skip("transformers has a head of its own all the same")
    config, model = reference(model_type, tie_word_embeddings=tied)
    model.tie_weights()
    arch = Architecture.from_config(config.to_dict())
    in_files = ("layer_scalar", "expert_bias", "e_score_correction_bias")
    scalars = [each for name, each in model.named_buffers() if name.endswith(in_files)]
    assert arch.parameters == sum(each.numel() for each in (*model.parameters(), *scalars))
    assert arch.tied == tied
    named = [(name, each) for name, each in model.named_modules() if not name.endswith(RATES)]
    linears = sum(each.weight.numel() for _, each in named if isinstance(each, torch.nn.Linear))
    if not arch.experts:  # transformers keeps experts in three-dimensional parameters
        assert arch.linear_parameters + arch.vocab * arch.hidden == linears


def test_experts_beside_a_dense_mlp_are_counted():
    experts = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 72}
    config, model = reference("gemma4_text", **experts)
    arch = Architecture.from_config(config.to_dict())
    counted = (*model.parameters(), *(each for name, each in model.named_buffers() if name.endswith("layer_scalar")))
    assert arch.parameters == sum(each.numel() for each in counted)
    assert (arch.experts, arch.experts_active, arch.dense_layers) == (5, 3, 0)


@pytest.mark.parametrize(
    ("fields", "dense"),
    [({"decoder_sparse_step": 2}, 4), ({"mlp_only_layers": [0, 6]}, 2), ({"mlp_only_layers": [1, 2, 8],
      "decoder_sparse_step": 3}, 6), ({"mlp_only_layers": [*range(7)]}, 0)],
)  # fmt: skip
def test_layers_without_experts_are_counted(fields, dense):
    config, model = reference("qwen3_moe", **fields)
    arch = Architecture.from_config(config.to_dict())
    assert arch.parameters == sum(each.numel() for each in model.parameters())
    assert arch.dense_layers == dense
    assert sum(hasattr(layer.mlp, "experts") for layer in model.model.layers) == arch.expert_layers


LEFT_OUT = [
    {"num_local_experts": None, "num_experts": None}, {"num_local_experts": None, "num_experts": 5},
    {"num_experts_per_tok": None}, {"moe_intermediate_size": None}, {"num_experts": 0}, {"attention_bias": False},
    {"attention_bias": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "fields"),
    # A gpt-oss has experts, and mixtral's class knows no biases.
    [*[("qwen3_moe", each) for each in LEFT_OUT], *[("mixtral", each) for each in LEFT_OUT[:5]],
     *[("gpt_oss", each) for each in LEFT_OUT if each != {"num_experts": 0}]],
)  # fmt: skip
def test_what_a_mixture_leaves_out_is_what_the_engine_takes_it_for(model_type, fields):
    counts = {"num_experts": 9, "moe_intermediate_size": 72}
    config = {"model_type": model_type, **SHAPE, "num_experts_per_tok": 3, **counts, **fields}
    if model_type == "gpt_oss":
        config["num_local_experts"] = config.pop("num_experts")
    config = {key: value for key, value in config.items() if value is not None}
    module = ARCHITECTURES[model_type]
    with torch.device("meta"):
        model = module.Model(module.Config.from_dict(config))
    arch = Architecture.from_config(config)
    assert arch.parameters == sum(each.numel() for each in model.parameters())
    assert (arch.experts, arch.experts_active) == (model.config.experts, model.config.experts_active)


@pytest.mark.parametrize("fields", [{"mlp_only_layers": 3}, {"mlp_only_layers": ["0"]}, {"decoder_sparse_step": 0}])
def test_layers_that_are_none_are_refused(fields):
    with pytest.raises(LocalqError, match="is invalid") as caught:
        Architecture.from_config({**HUB["qwen3-30b-a3b"], **fields})
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3"]
)
def test_columns_are_those_of_transformers_linears(model_type):
    config, model = reference(model_type)
    arch = Architecture.from_config(config.to_dict())
    linears = {name: m.in_features for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(linears) >= 4 * 7
    assert {name: arch.columns_of(name.rpartition(".")[2]) for name in linears} == linears
    assert arch.columns_of("router") is None


@pytest.mark.parametrize(
    "model_type",
    [
        "cohere2_moe",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
        "ministral3",
        "mistral",
        "mixtral",
        "muse_glimmer_text",
        "olmo3",
        "qwen2",
        "qwen3_moe",
    ],
)
def test_windows_are_those_of_transformers(model_type):
    fields = {"sliding_window": 96}
    if model_type.startswith("qwen"):
        fields |= {"use_sliding_window": True, "max_window_layers": 4}  # qwen3_moe passes over the second
    config, _ = reference(model_type, **fields)
    listed = Architecture.from_config(config.to_dict())
    windowed = sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []) or 7
    assert (listed.window, listed.window_layers) == (96, windowed)
    before = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    assert Architecture.from_config(before) == listed


@pytest.mark.parametrize("name", HUB)
def test_a_hub_config_gives_the_facts_of_the_catalogue(name):
    assert Architecture.from_config(HUB[name]) == catalog.find(name).arch


def test_a_wrapper_states_tying_for_its_text_part():
    config = {**HUB["gemma-3-4b"], "tie_word_embeddings": False}
    assert Architecture.from_config(config).tied is False


@pytest.mark.parametrize("pattern", ["6", "LLLG", -1, 2.5, [6]])
def test_a_pattern_of_windows_is_a_number(pattern):
    with pytest.raises(LocalqError, match="sliding_window_pattern has an invalid value: ") as caught:
        Architecture.from_config({**HUB["gemma-3-1b"], "sliding_window_pattern": pattern})
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize(
    "fields",
    [{"num_attention_heads": 8192, "num_key_value_heads": 1}, {"num_key_value_heads": 5},
     {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}],
)  # fmt: skip
def test_numbers_that_no_model_has_together(fields):
    with pytest.raises(LocalqError, match=r"are inconsistent|3 experts per token") as caught:
        Architecture.from_config({**HUB["llama-3.1-8b"], **fields})
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_unknown_architectures_and_missing_fields_are_refused_by_name():
    with pytest.raises(LocalqError, match="'mamba' is not supported"):
        Architecture.from_config({"model_type": "mamba"})
    with pytest.raises(LocalqError, match="None is not supported"):
        Architecture.from_config({})
    config = {key: value for key, value in HUB["llama-3.1-8b"].items() if key != "hidden_size"}
    with pytest.raises(LocalqError, match="'hidden_size' is missing"):
        Architecture.from_config(config)
