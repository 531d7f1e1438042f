"""A quantization described beside config.json is read as if config.json stated it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.hub import fetch as hub
from localq.files.hub import remote
from localq.files.model_folder import open_model
from localq.files.quantization_files import NAMES, describe
from localq.files.stored_format import scheme_of
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.files import fake_hub, hub_server
from tests.support.formats.int4_checkpoints import Int4, write
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = LoadOptions(device="cpu", dtype="float32")
GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
BASE = {"model_type": "llama", "num_hidden_layers": 1}


def folder_of(path: Path, tensor: str = "a.qweight", config: object = BASE, **files: object) -> Path:
    """A model folder with one tensor; `files` by name, with __ for the dot."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({tensor: torch.zeros(8, 8)}, path / "model.safetensors")
    for name, content in {"config__json": config, **files}.items():
        (path / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "stated", "method"),
    [
        ("quantize_config__json", GPTQ, "gptq"),
        ("quantize_config__json", {**GPTQ, "quant_method": "GPTQ", "checkpoint_format": "gptq_v2"}, "gptq"),
        ("quantize_config__json", AWQ, "awq"),
        ("quant_config__json", AWQ, "awq"),
        ("quant_config__json", {"wbits": 4}, "squeezellm"),
        ("quantization_config__json", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "awq"),
        ("hf_quant_config__json", MODELOPT, "nvfp4"),
        ("hf_quant_config__json", {"quantization": {"quant_algo": "FP8"}}, "fp8"),
        ("hf_quant_config__json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "modelopt"),
    ],
)
def test_every_program_s_file_is_read(tmp_path, name, stated, method):
    found = open_model(folder_of(tmp_path / "m", **{name: stated})).quantization
    assert found["quant_method"] == method
    inner = stated.get("quantization", stated)
    assert {key: each for key, each in found.items() if key != "quant_method"} == {
        key: each for key, each in inner.items() if key != "quant_method"
    }


def test_what_config_json_says_counts_first(tmp_path):
    own = {**BASE, "quantization_config": {"quant_method": "awq", "bits": 4}}
    folder = folder_of(tmp_path / "m", config=own, quantize_config__json=GPTQ, quant_config__json="[broken")
    assert open_model(folder).quantization == own["quantization_config"]


def test_the_older_key_of_compressed_tensors_is_read(tmp_path):
    folder = folder_of(tmp_path / "m", "a.weight_packed", {**BASE, "compression_config": {"format": "pack-quantized"}})
    assert open_model(folder).quantization["quant_method"] == "compressed-tensors"


def test_a_description_beside_full_precision_weights_is_ignored(tmp_path):
    folder = folder_of(tmp_path / "m", "a.weight", quantize_config__json=GPTQ)
    assert open_model(folder).quantization == {}
    assert open_model(folder, weights=False).quantization["quant_method"] == "gptq"  # the weights are not here yet


@pytest.mark.parametrize("content", ["[1]", "{", json.dumps({"sym": True}), "{}"])
def test_a_malformed_description_is_named(tmp_path, content):
    with pytest.raises(LocalqError, match=r"quantize_config\.json") as caught:
        open_model(folder_of(tmp_path / "m", quantize_config__json=content))
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_a_method_that_localq_does_not_read_is_named(tmp_path):
    other = {"quantization": {"quant_algo": "W4A8_AWQ"}}
    folder = folder_of(tmp_path / "m", "a.weight_scale", hf_quant_config__json=other)
    (folder / "config.json").write_text(json.dumps({
        **BASE, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1,
        "max_position_embeddings": 64}))  # fmt: skip
    with pytest.raises(LocalqError, match=r"'modelopt' \(W4A8_AWQ\), which is not supported") as caught:
        load(open_model(folder), CPU)
    assert caught.value.exit_code == ExitCode.FAILURE


@pytest.mark.parametrize(("of", "name"), [(Int4("gptq", 64), NAMES[0]), (Int4("awq", 64), NAMES[1])])
def test_a_model_is_the_same_wherever_its_quantization_is_described(tmp_path, of, name):
    write(tmp_path, of, torch.float32)
    stated = load(open_model(tmp_path), CPU)
    config = json.loads((tmp_path / "config.json").read_text())
    described = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LocalqError, match=f"no file .*{name}.* describes the quantization") as caught:
        load(open_model(tmp_path), CPU)
    assert "amaged" not in str(caught.value)
    (tmp_path / name).write_text(json.dumps({key: each for key, each in described.items() if key != "quant_method"}))
    files = open_model(tmp_path)
    beside, ids = load(files, CPU), prompt_of(12)
    assert (beside.format, scheme_of(files)) == (of.method, "g64")
    assert torch.equal(logits_of(beside.model, beside, ids), logits_of(stated.model, stated, ids))


def test_the_file_is_fetched_and_outlined(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        files = {**fake_hub.model_files(), **dict.fromkeys(NAMES, json.dumps(GPTQ).encode())}
        server.add(hub_server.REPO, files)
        folder = hub.fetch(hub_server.source())
        assert {*NAMES} <= {path.name for path in folder.iterdir()}
        from localq.files.hub import client

        with remote.outline(client.list_files(hub_server.REPO, "main")) as outlined:
            assert describe(outlined, {}) == {**GPTQ, "quant_method": "gptq"}


def test_what_describes_no_quantization_is_passed_over_beside_full_precision_weights(tmp_path):
    """As in ONNX repositories, which use the name for something else."""
    folder = make_checkpoint(tmp_path / "m")
    (folder / "quantize_config.json").write_text('{"per_channel": true, "reduce_range": true}')
    assert open_model(folder).quantization == {}
