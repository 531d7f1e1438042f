"""Laguna: gates per head, and configurations that no model can have."""

from __future__ import annotations

import pytest
import torch

from localq.errors import LocalqError
from localq.models import ARCHITECTURES
from localq.models.laguna import HeadGatedAttention
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME

CONFIG = BY_NAME["laguna"].config


def test_the_softplus_of_a_number_per_head_multiplies_what_the_head_gathers():
    part = tiny_models.ours("laguna").layers[1].self_attn
    assert isinstance(part, HeadGatedAttention)
    attended, gate = torch.randn(3, 8 * 16), torch.randn(3, 8)
    expected = attended.view(3, 8, 16) * torch.log1p(gate.exp())[..., None]
    torch.testing.assert_close(part.gated(attended, gate), expected.view(3, -1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gating": "per-element"}, "gating"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        ({"num_attention_heads_per_layer": [6, 8, 8, 4, 8]}, "num_attention_heads_per_layer has an unsupported value"),
        ({"num_attention_heads_per_layer": [6, 8]}, "num_attention_heads_per_layer is not a list of 5 numbers"),
        ({"num_attention_heads_per_layer": [6, 9, 9, 6, 9]}, "2 does not divide 9"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 5 values"),
        ({"mlp_layer_types": ["thick"] * 5}, "mlp_layer_types is not a list of 5 values"),
        ({"num_experts_per_tok": 7}, "7 experts per token are requested"),
    ],
)
def test_values_that_no_model_has_are_refused(fields, words):
    with pytest.raises(LocalqError, match=words):
        ARCHITECTURES["laguna"].Config.from_dict({**CONFIG, **fields})
