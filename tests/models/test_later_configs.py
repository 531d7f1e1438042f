"""config.json of OLMo 3, EXAONE 4, Seed-OSS, Granite, LFM2 and Qwen3-VL: what files leave out, and call otherwise."""

from __future__ import annotations

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.architecture import Architecture
from localq.files.model_folder import check_config
from localq.models import ARCHITECTURES, architecture
from tests.support.files.hub_configs import HUB
from tests.support.models.tiny_case import SHAPE

WIDTHS = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8}


def read(config):
    return architecture(config).Config.from_dict(config)


def test_scaling_of_an_olmo_3_is_that_of_layers_without_a_window():
    config = read(HUB["olmo-3-7b"])
    assert config.windows == (4096, 4096, 4096, 0) * 8
    near, whole = config.rope_kinds
    assert (near.kind, near.theta, whole.kind, whole.theta) == ("default", 5e5, "yarn", 5e5)
    assert (whole.factor, whole.original_context, whole.attention_factor) == (8.0, 8192, 1.2079441541679836)
    flat = {**HUB["olmo-3-7b"], "rope_scaling": None, "rope_theta": None}
    flat["rope_parameters"] = {**HUB["olmo-3-7b"]["rope_scaling"], "rope_theta": 500_000}
    assert read(flat) == config


def test_an_olmo_without_a_window_turns_alike_in_all_layers():
    config = read({**HUB["olmo-3-7b"], "sliding_window": None})
    assert (config.windows, {rope.kind for rope in config.ropes}) == ((0,) * 32, {"yarn"})


def test_an_exaone_4_turns_where_it_has_a_window_or_everywhere():
    large, small = read(HUB["exaone-4-32b"]), read(HUB["exaone-4-1.2b"])
    assert large.windows == (4096, 4096, 4096, 0) * 16
    assert [rope is None for rope in large.ropes] == [False, False, False, True] * 16
    assert (small.windows, None in small.ropes) == ((0,) * 30, False)
    lettered = {key: value for key, value in HUB["exaone-4-32b"].items() if key != "layer_types"}
    assert read(lettered) == large
    assert read({**lettered, "sliding_window_pattern": 4}) == large
    assert Architecture.from_config(lettered).windowed == Architecture.from_config(HUB["exaone-4-32b"]).windowed


@pytest.mark.parametrize("pattern", ["", "LXG", -1, 2.5, [4]])
def test_a_pattern_of_letters_or_a_number(pattern):
    config = {key: value for key, value in HUB["exaone-4-32b"].items() if key != "layer_types"}
    for reader in (read, Architecture.from_config):
        if pattern == "":  # as where the file states none
            continue
        with pytest.raises(LocalqError, match="sliding_window_pattern has an invalid value") as caught:
            reader({**config, "sliding_window_pattern": pattern})
        assert caught.value.exit_code == ExitCode.BAD_FILE


def test_biases_of_a_seed_oss_have_keys_of_their_own():
    plain = {"model_type": "seed_oss", **SHAPE}
    assert (read(plain).qkv_bias, read(plain).output_bias) == (True, False)
    stated = {**plain, "attention_bias": False, "attention_out_bias": True}
    assert (read(stated).qkv_bias, read(stated).output_bias) == (False, True)
    arch = Architecture.from_config(stated)
    assert (arch.qkv_bias, arch.output_bias) == (False, True)
    assert read({"model_type": "seed_oss"}).heads == 80


def test_the_stream_of_a_granite_is_divided():
    config = read(HUB["granite-3.3-8b"])
    assert config.eps == pytest.approx(1e-5 / 0.22**2)
    assert config.embedding_factor == pytest.approx(12 / 0.22)
    assert (config.attention_scale, config.logit_factor) == (1 / 128, 1 / 16)
    plain = read({"model_type": "granite", **SHAPE})
    assert (plain.attention_scale, plain.eps, plain.embedding_factor, plain.logit_factor) == (1.0, 1e-5, 1.0, 1.0)
    for key in ("residual_multiplier", "logits_scaling"):
        with pytest.raises(LocalqError, match=key) as caught:
            read({**HUB["granite-3.3-8b"], key: 0})
        assert caught.value.exit_code == ExitCode.BAD_FILE


def test_the_width_of_an_lfm2_is_two_thirds_in_whole_multiples():
    config = read(HUB["lfm2-1.2b"])
    assert (config.intermediate, config.eps, config.tied, config.activation) == (8192, 1e-5, True, "silu")
    assert sorted(set(range(16)) - config.convolved) == [2, 5, 8, 10, 12, 14]
    assert (config.convolution.channels, config.convolution.kernel, config.convolution.bias) == (2048, 3, False)
    (rope,) = config.rope_kinds
    assert (rope.theta, rope.rotary_dim) == (1e6, 64)
    small = {"model_type": "lfm2", **WIDTHS, "block_ff_dim": 6656, "intermediate_size": 9}
    assert read(small).intermediate == Architecture.from_config(small).intermediate == 4608  # LFM2-350M
    assert read({**small, "block_auto_adjust_ff_dim": False}).intermediate == 6656


def test_a_head_that_localq_has_written_counts_before_the_published_key():
    config = {**HUB["lfm2-1.2b"], "tie_word_embeddings": False}
    assert read(config).tied is Architecture.from_config(config).tied is False
    assert read({**HUB["lfm2-1.2b"], "tie_embedding": False}).tied is False


def test_the_lower_layers_of_an_lfm2_mixture_are_dense():
    config = read(HUB["lfm2.5-8b-a1b"])
    assert (config.experts, config.experts_active, config.expert_width, config.intermediate) == (32, 4, 1792, 7168)
    assert (config.dense, config.routing, config.selection_bias) == ({0, 1}, "sigmoid", True)
    assert len(config.convolved) == 18
    dense = {**HUB["lfm2.5-8b-a1b"], "num_dense_layers": 24}
    assert read(dense).experts == Architecture.from_config(dense).experts == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_L_cache", 1), ("conv_L_cache", 65), ("block_multiple_of", 0), ("block_ffn_dim_multiplier", -1.0),
        ("block_ff_dim", 2**21), ("num_dense_layers", -1), ("num_dense_layers", 257),
    ],
)  # fmt: skip
def test_sizes_of_an_lfm2_have_limits(key, value):
    with pytest.raises(LocalqError, match=key) as caught:
        check_config({**HUB["lfm2-1.2b"], key: value}, "config.json")
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("full_attn_idxs", ["2"]), ("full_attn_idxs", 2), ("block_ffn_dim_multiplier", "1"), ("block_multiple_of", 0),
        ("conv_L_cache", 99), ("conv_bias", 1), ("layer_types", ["conv"]),
    ],
)  # fmt: skip
def test_values_of_an_lfm2_that_no_model_has(key, value):
    with pytest.raises(LocalqError, match=key) as caught:
        read({**HUB["lfm2-1.2b"], key: value})
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_axes_of_a_qwen3_vl_are_one_in_a_text():
    config = read(HUB["qwen3-vl-8b"])
    (rope,) = config.rope_kinds
    assert (rope.kind, rope.theta, rope.rotary_dim, config.qk_norm, config.tied) == ("default", 5e6, 128, True, False)
    flat = {**HUB["qwen3-vl-8b"]["text_config"], "tie_word_embeddings": False}
    assert read(flat) == config


def test_names_of_an_lfm2_in_files():
    rename = ARCHITECTURES["lfm2_moe"].rename
    assert rename("model.embedding_norm.weight") == "norm.weight"
    assert rename("model.layers.1.self_attn.out_proj.weight") == "layers.1.self_attn.o_proj.weight"
    assert rename("model.layers.1.conv.out_proj.weight") == "layers.1.conv.out_proj.weight"
    assert rename("model.layers.1.feed_forward.expert_bias") == "layers.1.mlp.router.selection_bias"
    assert rename("model.layers.1.feed_forward.gate.weight") == "layers.1.mlp.router.weight"
    assert rename("model.layers.1.feed_forward.experts.3.w2.weight") == "layers.1.mlp.experts.3.down_proj.weight"
    assert rename("model.layers.1.feed_forward.w3.weight") == "layers.1.mlp.up_proj.weight"


def test_names_of_a_qwen3_vl_in_files():
    rename = ARCHITECTURES["qwen3_vl"].rename
    assert rename("model.language_model.norm.weight") == "norm.weight"
    assert rename("lm_head.weight") == "lm_head.weight"
    assert rename("model.visual.blocks.0.attn.qkv.weight") is None
