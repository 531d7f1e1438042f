"""GLM-4.7-Flash: absorbed products, what the cache holds, and configurations that no model can have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from localq.engine.cache import KVCache
from localq.errors import ExitCode, LocalqError
from localq.files.architecture import Architecture
from localq.files.layer_caches import Latents
from localq.models import ARCHITECTURES, glm4_moe_lite
from localq.models.latent_attention import LatentAttention
from localq.models.rope import rotate
from localq.planner.placement import Wishes
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME

CONFIG = BY_NAME["glm4-lite"].config
NAMES = [name for name in BY_NAME if name.startswith("glm4-lite")]


def config_of(**fields: Any) -> glm4_moe_lite.Config:
    return glm4_moe_lite.Config.from_dict({**CONFIG, **fields})


def test_absorbed_products_are_attention_over_keys_and_values_of_every_head():
    model = tiny_models.ours("glm4-lite")
    part, tokens = model.layers[1].self_attn, 9
    assert isinstance(part, LatentAttention)
    cache = KVCache(model.cache_layout(), 16, torch.float32, "cpu")
    x, step = torch.randn(tokens, 72), model.begin(torch.arange(tokens), cache, tokens)
    with torch.inference_mode():
        found = part(x, step)
        _, kept = part.absorbed(x, step)
        queries = part.queries(x)
        turning = queries[..., 9:].unflatten(-1, (3, 2)).mT.flatten(2)  # neighbours turn together
        queries = torch.cat((queries[..., :9], rotate(turning, *step.rotary[0])), -1).transpose(0, 1)
        keys, values = part.kv_b_proj(kept[:, :26]).view(tokens, 6, 9 + 11).transpose(0, 1).split((9, 11), -1)
        keys = torch.cat((keys, kept[:, 26:].expand(6, -1, -1)), -1)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=15**-0.5)
        expected = part.o_proj(attended.transpose(0, 1).flatten(1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_holds_a_latent_and_one_turned_key_per_token(name):
    model = tiny_models.ours(name)
    assert model.cache_layout() == (Latents(26 + 6),) * 5
    arch = Architecture.from_config(BY_NAME[name].config)
    assert arch.layer_caches == model.cache_layout()
    assert arch.kv_bytes_per_token(16) == 2 * 5 * 32
    assert KVCache(model.cache_layout(), 48, torch.bfloat16, "cpu").bytes() == 48 * arch.kv_bytes_per_token(16)


@pytest.mark.parametrize("passes", [(3,), (8, 1, 2), (1, 5, 5)])
def test_several_rows_in_a_step_give_the_logits_of_single_ones(passes):
    """Drafted tokens, some of which are dropped: those behind them overwrite their slots."""
    model, ids = tiny_models.ours("glm4-lite"), tiny_models.token_ids()
    caches = [KVCache(model.cache_layout(), 64, torch.float32, "cpu") for _ in range(2)]
    for cache in caches:
        tiny_models.logits_of_passes(model, ids, cache, 0, (16,))
    tiny_models.logits_of_passes(model, ids.flip(0), caches[0], 16, (4,))  # other tokens, not accepted
    count = sum(passes)
    rows = tiny_models.logits_of_passes(model, ids, caches[0], 16, passes)
    alone = tiny_models.logits_of_passes(model, ids, caches[1], 16, (1,) * count)
    torch.testing.assert_close(rows, alone, rtol=0, atol=1e-4)


def test_the_bits_of_the_cache_are_16():
    arch = Architecture.from_config(CONFIG)
    for bits in (8, "k8v4", 4):
        with pytest.raises(
            LocalqError, match="this model has a latent KV cache, which supports only 16 bits"
        ) as caught:
            Wishes(kv_bits=bits).check(arch)
        assert caught.value.exit_code == ExitCode.USAGE
    Wishes(kv_bits=16).check(arch)
    assert {each.kv_bits for each in Wishes().placements(arch)} == {16}


def test_other_names_of_files():
    renamed = {key: value for key, value in CONFIG.items() if key != "n_routed_experts"}
    older = {**renamed, "num_local_experts": 6, "head_dim": 6, "first_k_dense_replace": 1, "topk_method": "noaux_tc"}
    assert glm4_moe_lite.Config.from_dict(older) == config_of()
    assert Architecture.from_config(older) == Architecture.from_config(CONFIG)
    gate = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert glm4_moe_lite.rename(gate) == "layers.1.mlp.router.selection_bias"


def test_null_means_no_latent_of_queries():
    assert config_of(q_lora_rank=None).latents.query_latent == 0
    left_out = {key: value for key, value in CONFIG.items() if key != "q_lora_rank"}
    assert glm4_moe_lite.Config.from_dict(left_out).latents.query_latent == 768
    assert Architecture.from_config({**CONFIG, "q_lora_rank": None}).query_latent == 0


def test_the_longest_context_is_that_of_the_rotary_embedding():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 100.0}
    fields = {"rope_parameters": yarn, "max_position_embeddings": 40}
    assert config_of(**fields).max_context == Architecture.from_config({**CONFIG, **fields}).max_context == 160


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"attention_chunk_size": 8}, "attention_chunk_size"),
    ],
)
def test_features_that_the_reference_does_not_compute_are_refused(fields, words):
    with pytest.raises(LocalqError, match=f"{words}: localq does not support") as caught:
        config_of(**fields)
    assert caught.value.exit_code == ExitCode.FAILURE


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank: 0 is not between"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank: '512' is not an integer"),
        ({"q_lora_rank": -1}, "q_lora_rank: -1 is not between"),
        ({"v_head_dim": 2**20}, "v_head_dim: 1048576 is not between"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim: 0 is not between"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: 5 is odd"),
        ({"rope_interleave": "yes"}, "rope_interleave: 'yes' is not true or false"),
        ({"num_experts_per_tok": 7}, "7 experts per token are requested"),
        ({"n_group": 4}, "2 of 6 experts cannot come from 1 of 4 groups"),
        ({"n_group": 6, "topk_group": 3}, "6 experts in 6 groups leave fewer than two per group"),
        ({"n_shared_experts": 0}, "n_shared_experts: 0 is not between"),
        ({"n_shared_experts": 512, "moe_intermediate_size": 2**20}, "the shared experts have 536870912 columns"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: 0 is out of range"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 5 values"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 1.0}}, "factor: missing"),
    ],
)
def test_values_that_no_model_has_are_refused(fields, words):
    with pytest.raises(LocalqError, match=words) as caught:
        ARCHITECTURES["glm4_moe_lite"].Config.from_dict({**CONFIG, **fields})
    assert caught.value.exit_code == ExitCode.BAD_FILE
