"""A dense model in MXFP4: what is written, that it loads, and that it computes what its bytes stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from localq.bench.quality import bits
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.files.stored_format import format_of_config
from localq.formats import mxfp4
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.output.tensor_jobs import is_block_linear
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "qwen2", "qwen2", num_hidden_layers=2)  # with biases


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "qwen2-mxfp4"
    return by_tensor.convert(TensorwiseRequest(open_model(source), "mxfp4", out, shard_bytes=60_000))


def test_every_matrix_of_the_blocks_is_quantized_and_all_else_is_copied(source: Path, made: Path) -> None:
    with open_checkpoint(open_model(source)) as before, open_checkpoint(open_model(made)) as after:
        expected = {}
        for name, part in before.tensors.items():
            tensor = before.read(name)
            if is_block_linear(name, part.shape):
                expected |= mxfp4.to_tensors(mxfp4.quantize(tensor), name.removesuffix(".weight"))
            else:
                expected[name] = tensor
        assert len(expected) == len(before.tensors) + 2 * 7
        assert expected.keys() == after.tensors.keys()
        for name, tensor in expected.items():
            assert torch.equal(after.read(name), tensor), name


def test_the_configuration_says_what_it_is(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert format_of_config(config) == "mxfp4"
    assert bits.per_weight(open_model(made)) == 4.25


def test_it_loads_and_computes_what_its_bytes_stand_for(made: Path, tmp_path: Path) -> None:
    loaded = load(open_model(made), LoadOptions(device="cpu", dtype="float32"))
    assert loaded.format == "mxfp4"
    tensors: dict[str, torch.Tensor] = {}
    for shard in made.glob("*.safetensors"):
        tensors |= load_file(shard)
    for key in [key for key in tensors if key.endswith("_blocks")]:
        blocks, scales = tensors.pop(key), tensors.pop(key.replace("_blocks", "_scales"))
        packed = mxfp4.Packed(blocks.flatten(1), scales)
        name = key.removesuffix("_blocks").removeprefix("model.")
        assert torch.equal(loaded.model.get_parameter(name), mxfp4.dequantize(packed, torch.float32))
    ids = torch.arange(9)
    with torch.inference_mode():
        logits = loaded.model(ids, torch.arange(9), loaded.cache, 9)
    assert torch.isfinite(logits).all()


def test_a_damaged_scale_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with open_checkpoint(open_model(made)) as checkpoint:
        name = next(name for name in checkpoint.tensors if name.endswith("1.mlp.up_proj.weight_scales"))
        scales = checkpoint.read(name).numpy().tobytes()
    shard = next(path for path in tmp_path.glob("*.safetensors") if scales in path.read_bytes())
    shard.write_bytes(shard.read_bytes().replace(scales, scales[:-1] + b"\xff"))
    with pytest.raises(LocalqError, match="NaN") as caught:
        load(open_model(tmp_path), LoadOptions(device="cpu", dtype="float32"))
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert "layers.1.mlp.up_proj" in caught.value.what


def test_it_is_not_quantized_again_and_odd_rows_are_told(source: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalqError, match="already quantized \\(mxfp4\\)"):
        by_tensor.convert(TensorwiseRequest(open_model(made), "mxfp4", tmp_path / "again"))
    odd = make_checkpoint(tmp_path / "odd", "llama", intermediate_size=200, num_hidden_layers=1)
    notes: list[str] = []
    by_tensor.convert(TensorwiseRequest(open_model(odd), "mxfp4", tmp_path / "out"), say=notes.append)
    assert len(notes) == 1
    assert "not a multiple of 32" in notes[0]
