"""Tensors that no text needs are left out with a note, in a load and in a conversion; unknown ones are refused."""

from __future__ import annotations

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.extra_tensors import CACHE_SCALES, MORE_TOKENS, VALUE_HEAD
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import greedy_of, ids_of, prompt_of

CPU = LoadOptions(device="cpu", dtype="float32")


def behind(tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """A whole layer behind the last, and what makes it predict the token after the next."""
    last = config["num_hidden_layers"]
    of_first = {key: each for key, each in tensors.items() if key.startswith("model.layers.0.")}
    layer = {key.replace(".0.", f".{last}.", 1): each.clone() for key, each in of_first.items()}
    return {**layer, f"model.layers.{last}.eh_proj.weight": torch.zeros(128, 256)}


KINDS = {
    VALUE_HEAD: lambda tensors, config: {"v_head.summary.weight": torch.zeros(1, 128)},
    CACHE_SCALES: lambda tensors, config: {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(2.0)},
    MORE_TOKENS: behind,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_left_out_and_told(edit, reference, tmp_path, kind):
    files = edit(lambda tensors, config: tensors.update(KINDS[kind](tensors, config)))
    model = load(files, CPU)
    assert [line for line in model.notes if kind in line]
    assert ids_of(Engine(model), prompt_of(9), max_tokens=12) == greedy_of(reference, prompt_of(9), 12)
    copy = load(open_model(by_tensor.convert(TensorwiseRequest(files, "nf4", tmp_path / "out"))), CPU)
    assert not [line for line in copy.notes if kind in line]


@pytest.mark.parametrize("key", ["model.layers.0.self_attn.q_norm.weight", "lm_head.bias", "model.layers.9.x.weight"])
def test_an_unknown_tensor_is_refused_without_the_advice_to_download_again(edit, key):
    with pytest.raises(LocalqError, match="do not belong to this architecture") as caught:
        load(edit(lambda tensors, config: tensors.update({key: torch.ones(32)})), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert "again" not in str(caught.value)
    assert "a different repository" in caught.value.next_step
