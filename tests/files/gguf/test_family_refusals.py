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
        ("qwen3moe", another_count, r"blk.1.ffn_up_exps.weight' has shape \(5, 44, 96\), which is no stack of 6"),
        ("qwen3moe", no_stack, r"blk.1.ffn_up_exps.weight' has shape \(44, 96\), which is no stack"),
        ("gpt-oss", another_count, r"blk.1.ffn_up_exps.weight' has shape \(4, 64, 96\), which is no stack of 5"),
        ("gpt-oss", one_part, r"layers.1.mlp.experts.gate_up_proj has the part 'blk.1.ffn_gate_exps.weight' only"),
        ("gpt-oss", narrow, r"tensors differ in shape: 'blk.1.ffn_gate_exps.weight' \(5, 64, 96\) and "),
        ("qwen35", few_values, r"'blk.0.attn_gate.weight' has 106 rows, but the metadata gives 108"),
        ("qwen35", few_columns, r"'blk.0.ssm_out.weight' has 106 columns, but the metadata gives 108"),
        ("qwen35", one_block_more, r"'blk.7.attn_norm.weight' belongs to a block that is not there: block_count is 5"),
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
    with pytest.raises(LocalqError, match="gate and up differ in shape") as caught:
        load(open_model(path), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize(
    ("case", "key", "value", "words", "code"),
    [
        ("qwen3moe", "expert_count", 0, "key qwen3moe.expert_count has an invalid value: 0", ExitCode.BAD_FILE),
        ("qwen3moe", "expert_count", 2**20, "qwen3moe.expert_count has an invalid value", ExitCode.BAD_FILE),
        ("qwen3moe", "expert_used_count", 7, "7 experts per token", ExitCode.BAD_FILE),
        ("qwen3moe", "expert_gating_func", 2, "the value 2 of the key qwen3moe.expert_gating_func", ExitCode.FAILURE),
        ("qwen35moe", "nextn_predict_layers", 5, "nextn_predict_layers has an invalid value: 5", ExitCode.BAD_FILE),
        ("qwen35moe", "ssm.time_step_rank", 5, "ssm.time_step_rank is 5, which is no multiple", ExitCode.BAD_FILE),
        ("mixtral", "expert_used_count", 0, "expert_used_count has an invalid value: 0", ExitCode.BAD_FILE),
        ("ministral3", "attention.temperature_length", 9, "value 9 of the key", ExitCode.FAILURE),
    ],
)  # fmt: skip
def test_metadata_that_means_nothing_is_refused_by_key(tmp_path, weights, case, key, value, words, code):
    path = families.write(tmp_path / "m.gguf", families.CASES[case], weights(case), keys={key: value})
    with pytest.raises(LocalqError, match=words) as caught:
        load(open_model(path), CPU)
    assert caught.value.exit_code == code
