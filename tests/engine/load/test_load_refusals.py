"""Checkpoints that are damaged or not supported: refused by name, or loaded with a note of what is wrong."""

from __future__ import annotations

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import GREEDY, prompt_of

CPU = LoadOptions(device="cpu", dtype="float32")


def drop(key):
    return lambda tensors, config: tensors.pop(key)


def put(key, tensor):
    return lambda tensors, config: tensors.__setitem__(key, tensor)


NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
DAMAGED = [
    (drop(NORM), r"1 weights are missing \(first: 'norm\.weight'\)"),
    (put("model.extra.weight", torch.ones(3)), r"do not belong to this architecture \(first: 'extra\.weight'\)"),
    (put("norm.weight", torch.ones(128)), r"another tensor both map to 'norm\.weight'"),
    (put(NORM, torch.ones(127)), r"'model\.norm\.weight' has shape \[127\]; expected \[128\]"),
    (put(UP, torch.ones(192, 128, dtype=torch.int8)), r"up_proj\.weight' has unsupported dtype int8"),
    (put(UP, torch.ones(128, 192)), r"has shape \[128, 192\]; expected \[192, 128\]"),
]


@pytest.mark.parametrize(("change", "why"), DAMAGED, ids=[why for _, why in DAMAGED])
def test_damaged_checkpoints_are_refused_by_name(edit, change, why):
    with pytest.raises(LocalqError, match=why) as caught:
        load(edit(change), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_quantized_matrix_of_another_shape_is_refused(edit):
    def change(tensors, config):
        tensors.pop(UP)
        tensors.update(nf4.to_tensors(nf4.quantize(torch.randn(128, 192)), UP.removesuffix(".weight")))

    with pytest.raises(LocalqError, match=r"has shape \[128, 192\], not \[192, 128\]") as caught:
        load(edit(change), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_quantized_embedding_is_refused(edit):
    key = "model.embed_tokens.weight"

    def change(tensors, config):
        tensors.update(nf4.to_tensors(nf4.quantize(tensors.pop(key)), key.removesuffix(".weight")))

    with pytest.raises(LocalqError, match="'embed_tokens' is quantized but is not a linear layer"):
        load(edit(change), CPU)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_load_with_a_note_and_end_replies(edit, value):
    def change(tensors, config):
        tensors[UP][5, 7] = value

    loaded = load(edit(change), CPU)
    assert [note for note in loaded.notes if "1 weight tensors contain NaN or infinity" in note and UP in note]
    with pytest.raises(LocalqError, match="non-finite logits at token 1"):
        list(Engine(loaded).generate(prompt_of(4), GREEDY))


def test_a_head_that_cannot_be_quantized_is_named(edit):
    key = "lm_head.weight"

    def change(tensors, config):
        tensors[key] = torch.full_like(tensors["model.embed_tokens.weight"], float("nan"))
        config["tie_word_embeddings"] = False

    with pytest.raises(LocalqError, match=f"{key}: the weights contain NaN or infinity. Check the weights") as caught:
        load(edit(change), LoadOptions(device="cpu", dtype="float32", head="nf4"))
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize(("dtype", "notes"), [("float32", 0), ("float16", 1)])
def test_overflow_of_the_computing_type_is_noted(edit, dtype, notes):
    def change(tensors, config):
        tensors[UP][0, 0] = 1e5  # beyond float16

    assert len(load(edit(change), LoadOptions(device="cpu", dtype=dtype)).notes) == notes


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba2"}, "the architecture 'mamba2' is not supported"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "quantized with 'hqq'"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, r"bitsandbytes \(8-bit\)"),
    ],
)
def test_what_is_not_supported_is_named(edit, config, why):
    with pytest.raises(LocalqError, match=why) as caught:
        load(edit(lambda tensors, own: own.update(config)), CPU)
    assert caught.value.exit_code == ExitCode.FAILURE


def test_what_does_not_exist_is_a_usage_error(checkpoint):
    with pytest.raises(LocalqError, match="'int8' is not a supported dtype"):
        load(open_model(checkpoint), LoadOptions(device="cpu", dtype="int8"))
    for wrong in ({"kv_bits": 5}, {"embed": "disk"}, {"head": "32"}):
        with pytest.raises(LocalqError) as caught:
            load(open_model(checkpoint), LoadOptions(device="cpu", dtype="float32", **wrong))
        assert caught.value.exit_code == ExitCode.USAGE
