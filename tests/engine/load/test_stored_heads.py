"""The weights decide what the output head is, also where config.json says that it is the embedding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.errors import ExitCode, LocalqError
from localq.files import own_head
from localq.files.architecture import Architecture
from localq.files.model_folder import OWN_HEAD, ModelFiles, open_model
from localq.files.safetensors_headers import read_header, shard_paths
from localq.formats import nf4
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import greedy_of, ids_of, logits_of, prompt_of

CPU = LoadOptions(device="cpu", dtype="float32")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def with_head(head=None, table=None, tied=True):
    """A change of a checkpoint: `head` and `table` make the new matrices of the old ones; None keeps, "" drops."""

    def change(tensors, config):
        config["tie_word_embeddings"] = tied
        for key, make in ((HEAD, head), (TABLE, table)):
            old = tensors.setdefault(HEAD, torch.flip(tensors[TABLE], (0,))) if key == HEAD else tensors[TABLE]
            if make == "":
                tensors.pop(key)
            elif make is not None:
                tensors[key] = make(old)

    return change


def reply(model: LoadedModel) -> list[int]:
    return ids_of(Engine(model), prompt_of(9), max_tokens=12)


def own(head: torch.Tensor, row: int = -1) -> torch.Tensor:
    changed = head.clone()
    changed[row] += 0.5
    return changed


@pytest.mark.parametrize("tied", [True, None], ids=["stated", "by default of the family"])
def test_a_head_that_differs_from_the_embedding_is_used_and_named(edit, tied):
    change = with_head(own)

    def as_smollm3(tensors, config):
        change(tensors, config)
        if tied is None:
            config.pop("tie_word_embeddings")
            config["model_type"], config["no_rope_layers"] = "smollm3", [1] * config["num_hidden_layers"]

    files = edit(as_smollm3)
    model = load(files, CPU)
    assert model.model.lm_head is not None
    assert OWN_HEAD in model.notes
    assert model.ledger["head"] == model.model.lm_head.weight.nbytes
    assert not Architecture.from_config(files.config).tied
    if tied:
        from transformers import AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
        assert reply(model) == greedy_of(theirs, prompt_of(9), 12)


@pytest.mark.parametrize("row", [0, 150, -1])
def test_one_row_that_differs_is_enough(edit, row):
    files = edit(lambda tensors, config: with_head(lambda _: own(tensors[TABLE], row))(tensors, config))
    assert load(files, CPU).model.lm_head is not None


def test_an_equal_head_is_the_embedding_as_before(edit):
    files = edit(lambda tensors, config: with_head(lambda _: tensors[TABLE].clone())(tensors, config))
    model = load(files, CPU)
    assert model.model.lm_head is None
    assert model.ledger["head"] == 0
    assert not files.notes


def test_a_head_in_another_type_is_used(edit):
    files = edit(with_head(lambda head: head.bfloat16()))
    assert torch.equal(load(files, CPU).model.lm_head.weight, load(files, CPU).model.lm_head.weight.bfloat16().float())
    assert files.notes == (OWN_HEAD,)


def test_a_quantized_head_is_used(edit):
    def change(tensors, config):
        with_head()(tensors, config)
        packed = nf4.quantize(tensors.pop(HEAD))
        tensors.update(nf4.to_tensors(packed, "lm_head"))
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        change.head = nf4.dequantize(packed, torch.float32)

    model = load(edit(change), CPU)
    assert torch.equal(model.model.lm_head.weight, change.head)


def test_a_head_of_another_shape_is_refused_by_name(edit):
    with pytest.raises(LocalqError, match=r"'lm_head\.weight' has shape \[321, 128\]") as caught:
        load(edit(with_head(lambda head: torch.cat((head, head[:1])))), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_a_shared_matrix_may_be_stored_under_the_name_of_the_head(edit, checkpoint):
    files = edit(lambda tensors, config: with_head(lambda _: tensors[TABLE], "")(tensors, config))
    model = load(files, CPU)
    assert model.model.lm_head is None
    tied = replace(open_model(checkpoint), config={**files.config, "tie_word_embeddings": True})
    same = load(tied, CPU)
    ids = prompt_of(20)
    assert torch.equal(logits_of(model.model, model, ids), logits_of(same.model, same, ids))


def test_files_without_the_head_that_the_configuration_promises_name_the_switch(edit):
    with pytest.raises(LocalqError, match='set "tie_word_embeddings" to true') as caught:
        load(edit(with_head("", tied=False)), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_a_head_that_is_not_here_yet_counts_as_another_one(edit):
    """Fetched while it is quantized: its bytes cannot be compared before."""
    files = edit(lambda tensors, config: with_head(lambda _: tensors[TABLE].clone())(tensors, config))
    headers = [read_header(path) for path in shard_paths(files.path).values()]
    assert own_head.untied(files.config, headers) == files.config
    assert own_head.untied(files.config, headers, compare=False)["tie_word_embeddings"] is False
    without = [replace(each, tensors={key: at for key, at in each.tensors.items() if key != HEAD}) for each in headers]
    assert own_head.untied(files.config, without, compare=False) == files.config


def test_a_conversion_says_what_the_files_say(edit, tmp_path):
    files = edit(with_head(own))
    copy = open_model(by_tensor.convert(TensorwiseRequest(files, "nf4", tmp_path / "out")))
    assert copy.config["tie_word_embeddings"] is False
    assert not copy.notes
    assert torch.equal(load(copy, CPU).model.lm_head.weight, load(files, CPU).model.lm_head.weight)


@pytest.mark.parametrize("stated", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_both_places_of_a_nested_configuration_follow_the_files(edit, stated):
    """gemma3: the outer value, the inner one and the default of the class need not agree."""

    def change(tensors, config):
        with_head(own)(tensors, config)
        inner = {key: each for key, each in config.items() if key != "tie_word_embeddings"}
        config.clear()
        config.update({"model_type": "gemma3", **stated, "text_config": {**inner, "model_type": "gemma3_text"}})

    files: ModelFiles = edit(change)
    assert not Architecture.from_config(files.config).tied
    assert files.config["tie_word_embeddings"] is files.text_config["tie_word_embeddings"] is False
