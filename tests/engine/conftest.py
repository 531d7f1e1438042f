"""For all engine tests: one tiny llama, as transformers has it and as localq loads it; a snapshot of its cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.engine import cache_blocks, snapshot
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.files.model_folder import ModelFiles, open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import prompt_of
from tests.support.engine.snapshot_files import TOKENS, WEIGHTS, with_cache
from tests.support.models.tiny_checkpoints import make_checkpoint

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]  # of tensors by name, and of config.json


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and lose much where the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A float32 llama whose weights are large enough for logits that differ; the context is 512."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), dtype=torch.float32, initializer_range=0.15)


@pytest.fixture(scope="session")
def reference(checkpoint) -> Any:
    """The same in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def loaded(checkpoint) -> LoadedModel:
    """The same in localq, on the CPU. Tests that damage it load their own."""
    return load(open_model(checkpoint), LoadOptions(device="cpu", dtype="float32"))


@pytest.fixture
def engine(loaded) -> Engine:
    """A fresh conversation."""
    loaded.cache.clear()
    return Engine(loaded)


@pytest.fixture
def written(tmp_path, loaded, monkeypatch) -> tuple[Path, LoadedModel]:
    """A file of several blocks, and the model that it is of."""
    for module in (snapshot, cache_blocks):
        monkeypatch.setattr(module, "BLOCK", 4096)
    model, path = with_cache(loaded, torch.float32, 16, 64), tmp_path / "7.kv"
    snapshot.save(path, model, WEIGHTS, prompt_of(TOKENS))
    return path, model


@pytest.fixture
def edit(checkpoint, tmp_path) -> Callable[[Change], ModelFiles]:
    """A copy of the checkpoint in one file, changed by a function of its tensors and its configuration."""

    def make(change: Change) -> ModelFiles:
        folder = tmp_path / "edited"
        folder.mkdir()
        tensors = {}
        for shard in checkpoint.glob("*.safetensors"):
            tensors |= load_file(shard)
        config = json.loads((checkpoint / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return open_model(folder)

    return make
