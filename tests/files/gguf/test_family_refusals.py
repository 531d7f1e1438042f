"""Mixtures and hybrids whose tensors or metadata do not fit are refused with the name of the tensor or the key."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.files import tiny_gguf_families as families

CPU = LoadOptions(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The weights of a case."""
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def of(name):
        return families.read_folder(families.make_folder(families.CASES[name], folder / name))

    return of


def another_count(tensors):
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][:-1]


def no_stack(tensors):
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][0]


def one_part(tensors):
    del tensors["blk.1.ffn_up_exps.weight"]


def narrow(tensors):
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][:, :-4]


def few_values(tensors):
    tensors["blk.0.attn_gate.weight"] = tensors["blk.0.attn_gate.weight"][:-2]


def few_columns(tensors):
    tensors["blk.0.ssm_out.weight"] = tensors["blk.0.ssm_out.weight"][:, :-2]


def one_block_more(tensors):
    tensors["blk.7.attn_norm.weight"] = np.ones(96, np.float32)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("qwen3moe", another_count, r"blk.1.ffn_up_exps.weight' has shape \(5, 44, 96\), which is not a stack of 6"),
        ("qwen3moe", no_stack, r"blk.1.ffn_up_exps.weight' has shape \(44, 96\), which is not a stack"),
        ("gpt-oss", another_count, r"blk.1.ffn_up_exps.weight' has shape \(4, 64, 96\), which is not a stack of 5"),
        ("gpt-oss", one_part, r"experts.gate_up_proj is incomplete: only 'blk.1.ffn_gate_exps.weight' is present"),
        ("gpt-oss", narrow, r"tensors differ in shape: 'blk.1.ffn_gate_exps.weight' \(5, 64, 96\) and "),
        ("qwen35", few_values, r"'blk.0.attn_gate.weight' has 106 rows, but the metadata specifies 108"),
        ("qwen35", few_columns, r"'blk.0.ssm_out.weight' has 106 columns, but the metadata specifies 108"),
        ("qwen35", one_block_more, r"blk.7.attn_norm.weight' belongs to a block that does not exist \(block_count"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, weights, case, change, words):
    path = families.write(tmp_path / "m.gguf", families.CASES[case], weights(case), change=change)
    with pytest.raises(LocalqError, match=words) as caught:
        open_model(path)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_an_expert_that_is_narrower_than_the_metadata_says(tmp_path, weights):
    """The shapes of experts are checked where they are joined."""
    case = families.CASES["qwen3moe"]
    path = families.write(tmp_path / "m.gguf", case, weights("qwen3moe"), change=narrow)
    with pytest.raises(LocalqError, match="the gate and up matrices differ in shape") as caught:
        load(open_model(path), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize(
    ("case", "key", "value", "words", "code"),
    [
        ("qwen3moe", "expert_count", 0, "key qwen3moe.expert_count has an invalid value: 0", ExitCode.BAD_FILE),
        ("qwen3moe", "expert_count", 2**20, "qwen3moe.expert_count has an invalid value", ExitCode.BAD_FILE),
        ("qwen3moe", "expert_used_count", 7, "7 experts per token", ExitCode.BAD_FILE),
        ("qwen3moe", "expert_gating_func", 2, "unsupported value for qwen3moe.expert_gating_func: 2", ExitCode.FAILURE),
        ("qwen35moe", "nextn_predict_layers", 5, "nextn_predict_layers has an invalid value: 5", ExitCode.BAD_FILE),
        ("qwen35moe", "ssm.time_step_rank", 5, "ssm.time_step_rank is 5, but must be a multiple", ExitCode.BAD_FILE),
        ("nemotron-moe", "expert_group_count", 2, "unsupported value for nemotron_h_moe.expert_group_count: 2",
         ExitCode.FAILURE),
        ("nemotron-moe", "ssm.time_step_rank", 7, "is 7, but must divide ssm.inner_size", ExitCode.BAD_FILE),
        ("nemotron", "feed_forward_length", 0, "has 0 distinct nonzero values; expected one", ExitCode.BAD_FILE),
        ("mixtral", "expert_used_count", 0, "expert_used_count has an invalid value: 0", ExitCode.BAD_FILE),
        ("ministral3", "attention.temperature_length", 9, "unsupported value for", ExitCode.FAILURE),
        ("lfm2", "attention.head_count_kv", 2, "head_count_kv is not a list of 5 head counts", ExitCode.BAD_FILE),
        ("lfm2", "shortconv.l_cache", 0, "key lfm2.shortconv.l_cache has an invalid value: 0", ExitCode.BAD_FILE),
        ("lfm2moe", "expert_gating_func", 1, "unsupported value for", ExitCode.FAILURE),
    ],
)  # fmt: skip
def test_metadata_that_means_nothing_is_refused_by_key(tmp_path, weights, case, key, value, words, code):
    path = families.write(tmp_path / "m.gguf", families.CASES[case], weights(case), keys={key: value})
    with pytest.raises(LocalqError, match=words) as caught:
        load(open_model(path), CPU)
    assert caught.value.exit_code == code
