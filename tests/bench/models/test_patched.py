"""The benchmark of `patch`: random models of the sizes it says, refusals before any work."""

from __future__ import annotations

import io
import json

import pytest
import torch

from localq.bench.models import patched, plan
from localq.engine.load.device import DeviceChoice
from localq.errors import LocalqError

bitsandbytes = pytest.importorskip("bitsandbytes")
TINY = patched.ModelSize(256, 512, 2, 1)


def test_the_model_has_linear4bit_in_its_layers_and_a_plain_head():
    model = patched.random_model(TINY, 3, torch.device("cpu"))
    kinds = [type(model.model.layers[2].get_submodule(path)) for path in patched.MODULES]
    assert kinds == [bitsandbytes.nn.Linear4bit] * len(patched.MODULES)
    weight = model.model.layers[0].mlp.gate_proj.weight
    assert (list(weight.quant_state.shape), weight.quant_state.nested) == ([512, 256], True)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.dtype == torch.float16


def test_one_layer_is_refused():
    with pytest.raises(LocalqError, match="1 is too few"):
        patched.run(io.StringIO(), layers=1)


def test_without_bitsandbytes_it_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalqError, match="bitsandbytes is not installed"):
        patched.run(io.StringIO())


def test_a_size_that_fails_is_named_and_the_others_go_on(monkeypatch):
    def made(size: patched.ModelSize, layers: int, device: torch.device) -> object:
        if size is TINY:
            raise AttributeError("'Linear4bit' has changed\nsince")
        return object()

    monkeypatch.setattr(patched, "SIZES", {"8B": TINY, "70B": patched.ModelSize(1, 1, 1, 1)})
    monkeypatch.setattr(patched, "random_model", made)
    monkeypatch.setattr(patched, "_measure", lambda *given: {"end_to_end": []})
    monkeypatch.setattr(patched.devices, "pick", lambda word: DeviceChoice(torch.device("cpu")))
    monkeypatch.setattr(patched.roofline, "read_bytes_per_s", lambda device: 1e12)
    out = io.StringIO()
    result = patched.run(out)
    assert result["failures"] == ["8B: AttributeError: 'Linear4bit' has changed"]
    assert list(result["sizes"]) == ["70B"]
    assert json.loads(out.getvalue().splitlines()[-1])["failures"] == result["failures"]


@pytest.mark.cuda
def test_a_run_over_a_tiny_model(monkeypatch):
    monkeypatch.setattr(patched, "SIZES", {"27B": TINY})
    monkeypatch.setattr(patched, "BATCHES", (1, 9))
    monkeypatch.setattr(patched, "KERNEL_ROWS", (1, 64))
    monkeypatch.setattr(patched.roofline, "copies_for_cold_cache", lambda bytes_each, cache_bytes: 3)
    monkeypatch.setattr(patched.roofline, "read_bytes_per_s", lambda device: 1e12)
    out = io.StringIO()
    result = patched.run(out, layers=2, tokens=4, repeat=1)
    assert json.loads(out.getvalue().splitlines()[-1]) == json.loads(json.dumps(result))
    measured = result["sizes"]["27B"]
    assert [row["batch"] for row in measured["end_to_end"]] == [1, 9]
    assert all(row["patched_tok_per_s"] > 0 for row in measured["end_to_end"])
    assert len(measured["kernels"]) == 2 * len(patched.MODULES)
