"""FP8 weights against transformers and against f64, and models in FP8 against the same weights in 16 bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats import fp8_source
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from localq.sampling import Sampling
from tests.support.formats import fp8_checkpoints
from tests.support.models.tiny_checkpoints import make_checkpoint

SINGLE = "model.safetensors"
WHOLE = 10**9  # bytes of a shard: one file


@pytest.mark.parametrize("shape", [(256, 384), (5, 256, 128), (130, 200), (3, 7, 129), (128, 128), (1, 1)])
@pytest.mark.parametrize("block", [(128, 128), (16, 40), None])
@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
def test_values_are_codes_times_scales_rounded_once(shape, block, scale_type):
    torch.manual_seed(0)
    codes, scales = fp8_checkpoints.quantize(torch.randn(shape) * 3, block)
    scales = scales.to(scale_type)
    exact = fp8_checkpoints.reference(codes, scales, block)
    found = fp8_source.dequantize(codes, scales, block or shape[-2:], torch.bfloat16)
    assert torch.equal(found, exact.float().bfloat16())
    assert torch.equal(fp8_source.dequantize(codes, scales, block or shape[-2:], torch.float32), exact.float())


@pytest.mark.parametrize("shape", [(256, 384), (2, 128, 256)])
@pytest.mark.parametrize("scale_type", [torch.float32, torch.float8_e8m0fnu])
def test_transformers_dequantizes_to_the_same_bits(shape, scale_type):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(1)
    codes, scales = fp8_checkpoints.quantize(torch.randn(shape), (128, 128))
    scales = scales.to(scale_type)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    assert torch.equal(fp8_source.dequantize(codes, scales, (128, 128), torch.bfloat16), expected)


def test_pieces_of_a_large_matrix(monkeypatch):
    monkeypatch.setattr(fp8_source, "PIECE_WEIGHTS", 300)
    test_values_are_codes_times_scales_rounded_once((130, 200), (16, 40), torch.float32)


def folder_in(tmp_path: Path, model_type: str = "llama", **options: object) -> Path:
    folder = make_checkpoint(tmp_path / model_type, model_type, shard_bytes=WHOLE)
    fp8_checkpoints.rewrite(folder, **options)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("options", [{"block": (128, 128)}, {"block": (64, 32)}, {"block": None, "activations": True}])
def test_a_model_in_fp8_replies_as_its_weights_in_16_bit(tmp_path, model_type, options):
    folder = folder_in(tmp_path, model_type, **options)
    replies = []
    for path in (folder, folder.with_name(f"{model_type}-plain")):
        model = load(open_model(path), LoadOptions(device="cpu", ctx=64, dtype="bfloat16"))
        engine = Engine(model)
        steps = engine.generate([3, 5, 7], Sampling(temperature=0.0), max_tokens=12)
        replies.append([token for step in steps for token in step.ids])
    assert replies[0] == replies[1]
    assert len(replies[0]) == 12


def test_the_format_is_named(tmp_path):
    model = load(open_model(folder_in(tmp_path)), LoadOptions(device="cpu", ctx=64))
    assert model.format == "fp8"


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_nf4_of_it_is_that_of_its_weights_in_16_bit(tmp_path, model_type):
    folder = folder_in(tmp_path, model_type)
    made = []
    for path in (folder, folder.with_name(f"{model_type}-plain")):
        out = tmp_path / f"{path.name}-nf4"
        by_tensor.convert(TensorwiseRequest(open_model(path), "nf4", out))
        made.append(load_file(out / SINGLE))
        assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "bitsandbytes"
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stored: stored.pop(f"{WEIGHT}_scale_inv"), "has FP8 values but no scales"),
        (lambda stored: stored.update({f"{WEIGHT}_scale_inv": torch.ones(3, 3)}), "which does not match"),
        (lambda stored: stored.update({f"{WEIGHT}_scale_inv": torch.ones(2, 1, dtype=torch.int32)}), "no scales"),
        (lambda stored: stored.update({WEIGHT: stored[WEIGHT].flatten()}), "are not a matrix"),
    ],
)
def test_files_that_do_not_fit_together_are_refused_by_name(tmp_path, change, said):
    folder = folder_in(tmp_path)
    stored = load_file(folder / SINGLE)
    change(stored)
    save_file(stored, folder / SINGLE, {"format": "pt"})
    with pytest.raises(LocalqError, match=said) as caught:
        open_checkpoint(open_model(folder))
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("sides", [[128], [128, 0], ["a", 128]])
def test_a_block_that_no_file_has(tmp_path, sides):
    folder = folder_in(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = sides
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LocalqError, match="weight_block_size"):
        open_checkpoint(open_model(folder))


def test_experts_in_fp4_are_named(tmp_path):
    folder = folder_in(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["expert_dtype"] = "fp4"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LocalqError, match="FP8 with experts in FP4"):
        load(open_model(folder), LoadOptions(device="cpu"))
