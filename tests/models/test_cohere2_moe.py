"""Cohere2 with experts: one norm before two parts, and configurations that no model can have."""

from __future__ import annotations

import pytest
import torch

from localq.errors import LocalqError
from localq.files.architecture import Architecture
from localq.files.model_folder import check_config
from localq.models import ARCHITECTURES
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME

CONFIG = BY_NAME["cohere2-moe"].config
READ = ARCHITECTURES["cohere2_moe"].Config.from_dict


def test_both_parts_read_one_norm_that_subtracts_the_mean():
    block = tiny_models.ours("cohere2-moe").layers[0]
    x = 3 + torch.randn(4, 72)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(block.input_layernorm(x), expected * block.input_layernorm.weight)
    assert block.norms().before_attention is block.norms().before_mlp is block.input_layernorm
    assert not hasattr(block, "post_attention_layernorm")


def test_neighbours_turn():
    part = tiny_models.ours("cohere2-moe").layers[0].self_attn
    q, k = torch.arange(2 * 14.0).view(1, 2, 14), torch.zeros(1, 1, 14)
    assert part.joined(q, k)[0, 1].tolist() == [*range(14, 28, 2), *range(15, 28, 2)]


def test_large_logits_are_told_apart():
    router = tiny_models.ours("cohere2-moe-dense").layers[2].mlp.router
    weights, chosen = router.choose(torch.tensor([[30.0, 40.0, 35.0, 50.0, -9.0]]))
    assert chosen.tolist() == [[3, 1, 2]]
    torch.testing.assert_close(weights, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize(
    ("fields", "turning", "sparse"),
    [
        ({}, [0, 1, 2, 4], [0, 1, 2, 3, 4]),
        ({"first_k_dense_replace": 2, "sliding_window_pattern": 2}, [0, 1, 2, 4], [2, 3, 4]),
        ({"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}, [0, 2, 3, 4], [3, 4]),
        ({"first_k_dense_replace": 5, "layer_types": ["full_attention"] * 5}, [0, 1, 2, 3, 4], []),
        ({"layer_types": ["full_attention"] * 5}, [], [0, 1, 2, 3, 4]),
    ],
)
def test_which_layers_turn_and_have_experts(fields, turning, sparse):
    config, arch = READ({**CONFIG, **fields}), Architecture.from_config({**CONFIG, **fields})
    assert [layer for layer, rope in enumerate(config.ropes) if rope] == turning
    assert sorted(config.sparse) == sparse
    assert arch.unrotated == (not turning)
    assert (arch.expert_layers, arch.experts) == (len(sparse), config.experts)
    assert arch.windowed == () or [each > 0 for each in config.windows] == [*arch.windowed]


REFUSED = [
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"expert_selection_fn": "topk"}, "expert_selection_fn"),
    ({"shared_expert_combination_strategy": "max"}, "shared_expert_combination_strategy"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"num_experts_per_tok": 6}, "6 experts per token are requested"),
    ({"sliding_window": None}, "sliding_window: missing"),
    ({"logit_scale": 0}, "logit_scale"),
    ({"layer_norm_eps": -1}, "layer_norm_eps"),
    ({"head_dim": 13}, "13 rotary dimensions"),
]
MALFORMED = [
    ({"first_k_dense_replace": 6}, "first_k_dense_replace has an invalid value: 6"),
    ({"prefix_dense_sliding_window_pattern": 0}, "prefix_dense_sliding_window_pattern has an invalid value: 0"),
    ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern has an invalid value: LLLG"),
    ({"num_shared_experts": 20_000}, "num_shared_experts has an invalid value: 20000"),
    ({"prefix_dense_intermediate_size": 0}, "prefix_dense_intermediate_size has an invalid value: 0"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 5 values"),
    ({"layer_types": ["chunked_attention"] * 5}, "layer_types is not a list of 5 values"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED + MALFORMED)
def test_values_that_no_model_has_are_refused(fields, words):
    with pytest.raises(LocalqError, match=words):
        READ({**CONFIG, **fields})


@pytest.mark.parametrize(("fields", "words"), MALFORMED)
def test_the_planner_refuses_the_same(fields, words):
    with pytest.raises(LocalqError, match=words):
        Architecture.from_config({**CONFIG, **fields})


@pytest.mark.parametrize(
    "fields",
    [{"num_shared_experts": 600}, {"first_k_dense_replace": -1}, {"prefix_dense_intermediate_size": 2**21},
     {"prefix_dense_sliding_window_pattern": 0}, {"layer_norm_eps": 0}, {"logit_scale": "1"}],
)  # fmt: skip
def test_a_file_with_a_size_outside_the_limits_is_refused(fields):
    check_config(CONFIG, "config.json")
    with pytest.raises(LocalqError, match=next(iter(fields))):
        check_config({**CONFIG, **fields}, "config.json")
