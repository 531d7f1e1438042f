"""Reading `config.json`: what is refused and by which name, both spellings, and files that were tampered with."""

from __future__ import annotations

import copy
import math
import random

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.architecture import Architecture
from localq.models import ARCHITECTURES, architecture, gemma3, llama, ministral3, mistral, phi3, qwen2, smollm3
from tests.support.files.hub_configs import HUB
from tests.support.models.tiny_case import SHAPE
from tests.support.models.tiny_cases import BY_NAME

LONG = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}


def read(config):
    return architecture(config).Config.from_dict(config)


def test_gpt_oss_as_published():
    config = read(HUB["gpt-oss-20b"])
    assert (config.experts, config.experts_active, config.intermediate, config.sinks) == (32, 4, 2880, True)
    assert config.windows == (128, 0) * 12
    assert (config.qkv_bias, config.output_bias, config.attention_scale, config.eps) == (True, True, 1 / 8, 1e-5)
    (rope,) = config.rope_kinds
    assert (rope.kind, rope.theta, rope.factor, rope.original_context) == ("yarn", 150_000, 32, 4096)
    assert rope.truncate is False
    assert rope.attention_factor == pytest.approx(1.3466, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 33}, "33 experts"),
        ({"num_local_experts": 2**20}, "between 1 and"),
        ({"num_local_experts": 0}, "between 1 and"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ],
)
def test_a_gpt_oss_that_cannot_be_is_refused(change, said):
    with pytest.raises(LocalqError) as caught:
        read({**HUB["gpt-oss-20b"], **change})
    assert said in str(caught.value)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_mixtures_as_published():
    mixtral, qwen = read(HUB["mixtral-8x7b"]), read({**HUB["qwen3-30b-a3b"], "norm_topk_prob": True})
    assert (mixtral.experts, mixtral.experts_active, mixtral.expert_width) == (8, 2, 14336)
    assert (qwen.experts, qwen.experts_active, qwen.expert_width, qwen.intermediate) == (128, 8, 768, 6144)
    assert qwen.qk_norm
    assert qwen.dense == frozenset()
    assert mixtral.windows + qwen.windows == (0,) * 80
    assert mixtral.routing == qwen.routing == "softmax_of_chosen"
    assert read(HUB["qwen3-30b-a3b"]).routing == "softmax_of_all"  # the class says so where a file says nothing


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 129}, "129 experts"),
        ({"num_local_experts": 2**20}, "between 1 and"),
        ({"num_local_experts": False}, "is not an integer"),
        ({"num_experts_per_tok": 0}, "between 1 and"),
        ({"moe_intermediate_size": -3, "intermediate_size": -3}, "intermediate_size"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(name, change, said):
    with pytest.raises(LocalqError) as caught:
        read({**HUB[name], **change})
    assert said in str(caught.value)
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("layers", ["0", [48], [-1], [True], [[0]], {"0": 1}])
def test_layers_without_experts_are_layers(layers):
    with pytest.raises(LocalqError, match="mlp_only_layers") as caught:
        read({**HUB["qwen3-30b-a3b"], "mlp_only_layers": layers})
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_which_layers_of_qwen3_moe_have_experts():
    config = read({**HUB["qwen3-30b-a3b"], "decoder_sparse_step": 2, "mlp_only_layers": [1, 4]})
    assert config.dense == {1} | set(range(0, 48, 2))
    assert read({**HUB["qwen3-30b-a3b"], "num_experts": 0}).experts == 0
    assert read({**HUB["qwen3-30b-a3b"], "decoder_sparse_step": 99}).experts == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2_moe"}, "qwen2_moe"),
        ({"model_type": "mixtral", "layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"model_type": "mixtral", "hidden_act": "gelu"}, "gelu"),
        ({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 64}, "shared_expert"),
        ({"model_type": None}, "architecture None"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 2, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 5}, "chunked"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"model_type": "ministral3", "layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4", **SHAPE}}, "'mistral4' in mistral3 is"),
        ({"model_type": "mistral3", "text_config": {"model_type": "llama", **SHAPE}}, "'llama' in mistral3 is not"),
        ({"model_type": "muse_glimmer_text", "layer_rope_theta": [0, 1e4, 1e5, 1e4, 0]}, "layer_rope_theta"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "olmo3", "layer_types": ["chunked_attention"] * 5}, "chunked"),
        ({"model_type": "exaone4", "layer_types": ["conv"] * 5}, "conv"),
        ({"model_type": "olmo2", "sliding_window": 9}, "sliding_window"),
        ({"model_type": "lfm2", "layer_types": ["sliding_attention"] * 5}, "sliding_attention"),
        ({"model_type": "granite", "num_local_experts": 4}, "num_local_experts"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3", **SHAPE}}, "'qwen3' in qwen3_vl is not"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(change, named):
    with pytest.raises(LocalqError, match=named) as caught:
        read({"model_type": "llama", **SHAPE, **change})
    assert caught.value.exit_code == ExitCode.FAILURE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("num_attention_heads", 7),
        ("num_key_value_heads", 4),
        ("num_key_value_heads", -2),
        ("vocab_size", 131.0),
        ("vocab_size", None),
        ("vocab_size", True),
        ("intermediate_size", "92"),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 0),
        ("rope_theta", math.inf),
        ("rope_scaling", ["linear"]),
        ("rope_scaling", {"type": "linear", "factor": -1.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.0] * 6}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}),
        ("partial_rotary_factor", 0.75),  # 9 of 12 columns: odd
        ("partial_rotary_factor", 1.5),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_what_no_model_can_have_is_a_bad_file(key, value):
    with pytest.raises(LocalqError, match=r"config\.json: ") as caught:
        read({"model_type": "llama", **SHAPE, key: value})
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_tampered_files_end_in_our_errors_only():
    """Every value of every case's file, at any depth, replaced by values that JSON can hold."""
    hostile = [None, True, -1, 0, 1, 3, 2**70, 0.5, -0.5, math.nan, math.inf, 10**400, "", "full_attention", [], [[]],
               ["x"], {}, {"rope_type": []}]  # fmt: skip
    choose = random.Random(3)
    refused = 0
    for _ in range(3000):
        config = copy.deepcopy(choose.choice(list(BY_NAME.values())).config)
        place = config
        while True:
            key = choose.choice(list(place))
            if not (isinstance(place[key], dict) and place[key] and choose.random() < 0.7):
                break
            place = place[key]
        place[key] = choose.choice(hostile)
        try:
            read(config)
        except LocalqError:
            refused += 1
    assert refused > 1000


def test_head_width_defaults_to_an_even_share_of_hidden():
    config = llama.Config.from_dict({**SHAPE, "num_key_value_heads": None})
    assert (config.head_dim, config.kv_heads) == (12, 6)


def test_mistral_has_a_window_unless_the_file_says_null():
    assert mistral.Config.from_dict(SHAPE).windows == (4096,) * 5
    assert mistral.Config.from_dict({**SHAPE, "sliding_window": None}).windows == (0,) * 5


def test_a_mistral_has_eight_kv_heads_unless_the_file_says_otherwise():
    shape = {
        key: value
        for key, value in {**SHAPE, "hidden_size": 96, "num_attention_heads": 24}.items()
        if key != "num_key_value_heads"
    }
    for stated, heads in (({}, 8), ({"num_key_value_heads": None}, 24), ({"num_key_value_heads": 3}, 3)):
        config = {"model_type": "mistral", **shape, **stated}
        assert mistral.Config.from_dict(config).kv_heads == Architecture.from_config(config).kv_heads == heads


def test_a_ministral3_file_may_leave_out_what_equals_the_defaults():
    config = ministral3.Config.from_dict({"model_type": "ministral3"})
    assert (config.layers, config.hidden, config.kv_heads, config.eps) == (34, 4096, 8, 1e-5)
    (rope,) = config.rope_kinds
    assert (rope.kind, rope.theta, rope.factor, rope.original_context) == ("yarn", 1e6, 16.0, 16384)
    assert (rope.attention_factor, config.max_context) == (1.0, 262_144)
    assert (config.query_growth, config.query_period) == (0.1, 16384)
    assert Architecture.from_config({"model_type": "ministral3"}).max_context == 262_144


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, None, False), (None, True, True), (True, False, True), (False, True, False), (True, None, True)],
)
def test_a_mistral3_says_outside_whether_the_embedding_is_the_head(outer, inner, tied):
    """As in transformers, whose head is outside the text model; what neither place says is not assumed."""
    text = {"model_type": "ministral3", **SHAPE, "tie_word_embeddings": inner}
    config = {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": outer}
    assert read(config).tied == Architecture.from_config(config).tied == tied


def test_the_text_part_of_a_mistral3_is_of_the_type_that_it_states():
    text = {**SHAPE, "sliding_window": None}
    config = {"model_type": "mistral3", "text_config": text}
    assert read(config) == mistral.Config.from_dict(text)  # where it states none
    assert Architecture.from_config(config).model_type == "mistral"
    config = {"model_type": "mistral3", "text_config": {"model_type": "ministral3", **SHAPE}}
    assert read(config).query_growth == 0.1
    assert Architecture.from_config(config).model_type == "ministral3"


def test_a_muse_glimmer_file_may_leave_out_what_equals_the_defaults():
    config = read({"model_type": "muse_glimmer", "text_config": {}})
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (52, 6656, 32, 2, 128)
    assert config.windows == (2048, 2048, 2048, 0) * 13
    assert [rope is None for rope in config.ropes] == [False, False, False, True] * 13
    assert (config.query_factor, config.post_eps, config.final_softcap, config.eps) == (3.87, 1e-8, 20.0, 1e-5)
    assert config.logit_factor == pytest.approx((config.hidden / 256) ** -0.5)
    assert config == read({"model_type": "muse_glimmer_text"})
    arch = Architecture.from_config({"model_type": "muse_glimmer"})
    assert (arch.window, arch.window_layers, arch.tied) == (2048, 39, False)


def test_both_spellings_of_tensor_names_of_a_mistral3_name_the_same_parameters():
    rename = ARCHITECTURES["mistral3"].rename
    for key in ("embed_tokens.weight", "layers.3.self_attn.q_proj.weight.absmax", "norm.weight"):
        assert rename(f"language_model.model.{key}") == rename(f"model.language_model.{key}") == key
    assert rename("language_model.lm_head.weight") == rename("lm_head.weight") == "lm_head.weight"
    for key in ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight"):
        assert rename(key) is rename(f"model.{key}") is None


def test_layer_types_of_later_files_win_over_the_pattern():
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention", "sliding_attention"]
    config = {**SHAPE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "layer_types": types}
    assert qwen2.Config.from_dict(config).windows == (9, 0, 0, 0, 9)


def test_early_phi3_files_say_su_for_longrope():
    config = {**SHAPE, "rope_scaling": {**LONG, "type": "su"}}
    assert {rope.kind for rope in phi3.Config.from_dict(config).ropes} == {"longrope"}


def test_longrope_takes_the_short_list_up_to_the_original_context():
    rope = phi3.Config.from_dict({**SHAPE, "original_max_position_embeddings": 32, "rope_scaling": LONG}).ropes[0]
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(80 / 32) / math.log(32)))
    short, long = rope.frequencies(32), rope.frequencies(33)
    assert (short / long).tolist() == pytest.approx([4.0] * 6)


def test_a_smollm3_without_the_list_turns_three_layers_of_four():
    ropes = smollm3.Config.from_dict({**SHAPE, "num_hidden_layers": 9}).ropes
    assert [rope is None for rope in ropes] == [False, False, False, True] * 2 + [False]


def test_a_gemma3_file_may_leave_out_what_equals_the_defaults():
    """The form of the published 4B: only what differs from the classes' defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    config = gemma3.Config.from_dict({"model_type": "gemma3", "text_config": text})
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.windows[:6] == (1024,) * 5 + (0,)
    near, spread = config.rope_kinds
    assert (near.kind, near.theta, spread.kind, spread.theta, spread.factor) == ("default", 1e4, "linear", 1e6, 8.0)
    assert config.tied


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_frequencies_that_old_files_store_are_not_parameters(model_type):
    rename = ARCHITECTURES[model_type].rename
    assert rename("model.layers.3.self_attn.rotary_emb.inv_freq") is None
    assert rename("model.layers.3.mlp.down_proj.weight.absmax") == "layers.3.mlp.down_proj.weight.absmax"
    assert rename("lm_head.weight") == "lm_head.weight"
