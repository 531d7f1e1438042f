"""The longest text of a model: what makers, vLLM and transformers mean by a scaling entry."""

from __future__ import annotations

import math

import pytest

from localq.files.architecture import Architecture
from localq.files.context_length import LONGEST, longest_context
from localq.models import ARCHITECTURES

SHAPE = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 512}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def yarn(factor: object = 4.0, **more: object) -> dict[str, object]:
    return {"rope_type": "yarn", "factor": factor, **more}


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({}, 512),
        ({"rope_scaling": None}, 512),
        ({"rope_scaling": yarn(original_max_position_embeddings=512)}, 2048),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
        ({"rope_parameters": {"rope_theta": 1e4, **yarn(original_max_position_embeddings=512)}}, 2048),
        ({"rope_scaling": yarn(2)}, 1024),  # transformers: original = max_position_embeddings
        ({"rope_scaling": yarn(2.5, original_max_position_embeddings=100)}, 512),
        ({"max_position_embeddings": 2048, "rope_scaling": yarn(original_max_position_embeddings=512)}, 2048),
        ({"rope_scaling": yarn(original_max_position_embeddings=300), "original_max_position_embeddings": 512}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 128}}, 1024),
        ({"rope_scaling": LLAMA3}, 512),
        ({"rope_scaling": {"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 64}}, 512),
        ({"rope_scaling": yarn(2.0**23, original_max_position_embeddings=512)}, LONGEST),
    ],
)  # fmt: skip
def test_the_planner_and_the_model_derive_the_same_length(fields, longest):
    config = {**SHAPE, **fields}
    assert Architecture.from_config(config).max_context == longest
    assert ARCHITECTURES["llama"].Config.from_dict(config).max_context == longest


def test_a_gemma3_states_the_extended_length():
    config = {"model_type": "gemma3", "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "max_position_embeddings": 131_072,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}  # fmt: skip
    assert Architecture.from_config(config).max_context == 131_072
    assert ARCHITECTURES["gemma3"].Config.from_dict(config).max_context == 131_072


@pytest.mark.parametrize("factor", [None, "4", True, 0, -2, 0.5, math.nan, math.inf, [4], 2.0**40, 10**400])
@pytest.mark.parametrize("original", [None, 0, -1, "512", 2**60, True])
def test_values_that_are_no_lengths_are_left_to_the_load(factor, original):
    entry = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    assert longest_context({**SHAPE, "rope_scaling": entry}) == 512


@pytest.mark.parametrize("entry", [[], "yarn", 3, {"rope_type": ["yarn"], "factor": 4.0}, {"full_attention": yarn()}])
def test_other_entries_extend_nothing(entry):
    assert longest_context({**SHAPE, "rope_scaling": entry}) == 512
