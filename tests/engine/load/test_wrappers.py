"""Checkpoints of multimodal wrappers: the text model loads by both spellings of its names, and towers are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.engine.load.load import LoadedModel, load
from localq.files.extra_tensors import TOWERS, is_of_tower
from localq.files.model_folder import open_model
from localq.planner import model_facts
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from tests.support.engine.engine_runs import prompt_of
from tests.support.models.tiny_case import MUSE_TOWER, PIXTRAL, QWEN_TOWER
from tests.support.models.tiny_cases import GEMMA4_TOWERS
from tests.support.models.tiny_checkpoints import WITH_IMAGES, make_checkpoint

GROWING = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0, "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4", {**GEMMA4_TOWERS["gemma4"], "tie_word_embeddings": True, "text_config": {
        "model_type": "gemma4_text", "num_hidden_layers": 4, "global_head_dim": 48, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 320, "tie_word_embeddings": True}}),
    "gemma4_unified": ("gemma4_unified", {
        **GEMMA4_TOWERS["gemma4_unified"], "tie_word_embeddings": True, "text_config": {
            "model_type": "gemma4_unified_text", "global_head_dim": 48, "attention_k_eq_v": True, "sliding_window": 16,
            "num_global_key_value_heads": 1, "tie_word_embeddings": True}}),
    "ministral3": ("mistral3", {"vision_config": PIXTRAL, "tie_word_embeddings": False, "text_config": {
        "model_type": "ministral3", "rope_parameters": GROWING}}),
    "ministral3-tied": ("mistral3", {"vision_config": PIXTRAL, "tie_word_embeddings": True, "text_config": {
        "model_type": "ministral3", "rope_parameters": GROWING, "max_position_embeddings": 128}}),
    "mistral": ("mistral3", {"vision_config": PIXTRAL, "tie_word_embeddings": False, "text_config": {
        "model_type": "mistral", "sliding_window": 16}}),
    "muse_glimmer": ("muse_glimmer", {**MUSE_TOWER, "text_config": {
        "model_type": "muse_glimmer_text", "sliding_window": 16, "output_multiplier": 0.5}}),
    "qwen3_vl": ("qwen3_vl", {**QWEN_TOWER, "tie_word_embeddings": False, "text_config": {
        "model_type": "qwen3_vl_text", "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}}),
}  # fmt: skip
TOWER, TEXT = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def older(name: str) -> str:
    """The name of a tensor in files before transformers 5."""
    name = name.replace("model.language_model.", "language_model.model.").removeprefix("model.")
    return f"language_model.{name}" if name.startswith("lm_head") else name


def newer(name: str) -> str:
    """The name of a tensor in files of transformers 5."""
    name = name.replace("language_model.lm_head", "lm_head").replace("language_model.model.", "model.language_model.")
    return name if name.startswith(("model.", "lm_head")) else f"model.{name}"


def rewrite(folder: Path, rename: Any) -> dict[str, torch.Tensor]:
    """Put the tensors under other names: those of the tower in a shard of their own. Returns these."""
    tensors = {rename(name): each for name, each in load_file(folder / "model.safetensors").items()}
    towers = {name: each for name, each in tensors.items() if is_of_tower(name)}
    save_file(towers, folder / TOWER)
    save_file({name: each for name, each in tensors.items() if name not in towers}, folder / TEXT)
    index = {"weight_map": {name: TOWER if name in towers else TEXT for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return towers


def logits_of(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    loaded.cache.clear()
    with torch.inference_mode():
        positions = torch.arange(len(ids))
        return loaded.model(torch.tensor(ids), positions, loaded.cache, len(ids), last_only=False)


@pytest.fixture(scope="module", params=CASES)
def written(request, tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A checkpoint in one file, and the logits of transformers."""
    from transformers import AutoModelForImageTextToText

    model_type, fields = CASES[request.param]
    assert model_type in WITH_IMAGES
    folder = make_checkpoint(
        tmp_path_factory.mktemp("wrapper"), model_type, dtype=torch.float32, shard_bytes=2**30, **fields
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return folder, model(input_ids=torch.tensor([prompt_of(40)])).logits[0]


@pytest.mark.parametrize("rename", [newer, older])
@pytest.mark.parametrize("tower_is_here", [True, False])
def test_the_text_model_loads_and_its_tower_is_left_out(written, rename, tower_is_here, tmp_path):
    source, expected = written
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    towers = rewrite(tmp_path, rename)
    assert len(towers) > 5
    if not tower_is_here:  # `hub.fetch` leaves it out
        (tmp_path / TOWER).unlink()
    loaded = load(open_model(tmp_path), LoadOptions(device="cpu", dtype="float32"))
    torch.testing.assert_close(logits_of(loaded, prompt_of(40)), expected, rtol=0, atol=1e-4)
    assert f"skipped (not needed for text): {TOWERS} ({len(towers)} tensors)" in loaded.notes
    assert {part: loaded.plan.ledger.components[part] for part in loaded.ledger} == loaded.ledger
    text = load_file(tmp_path / TEXT)
    held = sum(loaded.ledger[part] for part in ("weights", "embedding", "head"))
    assert held == sum(each.nbytes for each in text.values())
    shown = model_facts.lines(model_facts.of_name(str(tmp_path), Settings()))
    assert f"not loaded        {TOWERS} ({len(towers)} tensors)" in shown
