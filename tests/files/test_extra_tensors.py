"""Known tensors that generating text does not need are told from those that would change it."""

from __future__ import annotations

import pytest

from localq.files.extra_tensors import CACHE_SCALES, MORE_TOKENS, TABLES, TOWERS, VALUE_HEAD, extra_tensors, note

ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("v_head.summary.weight", VALUE_HEAD), ("v_head.summary.bias", VALUE_HEAD),
        ("pretrained_model.v_head.summary.weight", VALUE_HEAD), ("value_head.weight", VALUE_HEAD),
        (f"{ATTENTION}.k_proj.k_scale", CACHE_SCALES), (f"{ATTENTION}.v_proj.v_scale", CACHE_SCALES),
        (f"{ATTENTION}.k_scale", CACHE_SCALES), (f"{ATTENTION}.attn.v_scale", CACHE_SCALES),
        (f"{ATTENTION}.kv_scale", CACHE_SCALES), (f"{ATTENTION}.prob_scale", CACHE_SCALES),
        (f"{ATTENTION}.q_scale", CACHE_SCALES), (f"{ATTENTION}.k_proj.output_scale", CACHE_SCALES),
        (f"{ATTENTION}.kv_cache_scaling_factor", CACHE_SCALES), (f"{ATTENTION}.k_zero_point", CACHE_SCALES),
        ("mtp.layers.0.mlp.up_proj.weight", MORE_TOKENS), ("model.mtp.fc.weight", MORE_TOKENS),
        ("model.mtp_layers.0.input_proj.weight", MORE_TOKENS), ("model.layers.2.eh_proj.weight", MORE_TOKENS),
        ("language_model.model.layers.3.shared_head.head.weight", MORE_TOKENS),
        ("mtp.pre_fc_norm_hidden.weight", MORE_TOKENS), ("mtp.layers.0.mlp.experts.7.up_proj.weight", MORE_TOKENS),
        ("model.visual.blocks.0.attn.qkv.bias", TOWERS), ("visual.merger.norm.weight", TOWERS),
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj.weight", TOWERS),
        ("vision_tower.vision_model.head.probe", TOWERS), ("multi_modal_projector.linear_1.weight", TOWERS),
        ("model.multi_modal_projector.mm_input_projection_weight", TOWERS),
        ("model.vision_adapter.fc1.weight", TOWERS), ("vision_projection.weight", TOWERS),
        ("model.audio_tower.conv.weight", TOWERS), ("model.embed_vision.embedding_projection.weight", TOWERS),
        ("model.layers.0.visual.weight", None), ("vision_tower", None),
        (f"{ATTENTION}.rotary_emb.cos_cached", TABLES), (f"{ATTENTION}.masked_bias", TABLES),
        (f"{ATTENTION}.q_proj.weight", None), (f"{ATTENTION}.q_proj.weight_scale", None),
        (f"{ATTENTION}.q_proj.bias", None), (f"{ATTENTION}.q_norm.weight", None), ("model.extra.weight", None),
        ("model.layers.1.eh_proj.weight", None), ("model.layers.2.mlp.up_proj.weight", None), ("lm_head.bias", None),
        ("score.weight", None), ("model.layers.99999999999.eh_proj.weight", None), ("v_head", None), ("", None),
    ],
)  # fmt: skip
def test_only_known_kinds_are_left_out(name, kind):
    assert extra_tensors([name], 2) == ({} if kind is None else {kind: [name]})


def test_a_layer_that_predicts_more_tokens_is_left_out_as_a_whole():
    whole = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight", "model.layers.2.self_attn.k_scale"]
    others = ["model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"]
    assert extra_tensors([*others, *whole], 2) == {MORE_TOKENS: whole}
    assert extra_tensors([*others, *whole], None) == {CACHE_SCALES: whole[2:]}


def test_the_note_counts_them():
    assert note({}) == note({TABLES: ["x"]}) == ""
    assert note({VALUE_HEAD: ["a", "b"], TABLES: ["x"]}) == f"skipped (not needed for text): {VALUE_HEAD} (2 tensors)"
