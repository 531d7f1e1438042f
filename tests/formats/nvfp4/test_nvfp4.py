"""NVFP4 of compressed-tensors and of ModelOpt: bytes worked by hand, the package, damaged files, whole models."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files import compressed_tensors, modelopt
from localq.files.catalog import resolve
from localq.files.model_folder import open_model
from localq.formats import nvfp4, owner
from localq.formats.checkpoint import Checkpoint
from localq.planner import uncatalogued
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats import nvfp4_checkpoints
from tests.support.formats.memory_checkpoint import Held
from tests.support.formats.nvfp4_checkpoints import CONFIGS, reference, tensors
from tests.support.kernels import reference_kernels

CPU = LoadOptions(device="cpu", dtype="float32")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
UP = "model.layers.0.mlp.up_proj"


def checkpoint_of(made: dict[str, torch.Tensor]) -> Checkpoint:
    return Held({f"P{suffix}": each for suffix, each in made.items()}).checkpoint()


def test_bytes_by_hand():
    """Two groups of a row: 2 / 4 and 0.5 / 4 of compressed-tensors, times 4 of ModelOpt."""
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, :3], codes[0, 8] = torch.tensor([0x21, 0xF7, 0x8A], dtype=torch.uint8), 0x17
    scales = torch.tensor([[2.0, 0.5]]).to(E4M3)
    made = {".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": torch.tensor([4.0])}
    weight = nvfp4.dequantize(nvfp4.from_checkpoint(checkpoint_of(made), "P"), torch.float32)
    assert weight[0, :6].tolist() == [0.25, 0.5, 3.0, -3.0, -0.5, 0.0]  # the low nibble is first
    assert weight[0, 16:18].tolist() == [0.75, 0.0625]
    assert not weight[0, 6:16].any()
    made = {".weight": codes, ".weight_scale": scales, ".weight_scale_2": torch.tensor(4.0)}
    weight = nvfp4.dequantize(nvfp4.from_checkpoint(checkpoint_of(made), "P"), torch.float32)
    assert weight[0, :4].tolist() == [4.0, 8.0, 48.0, -48.0]
    assert weight[0, 16:18].tolist() == [12.0, 1.0]


@pytest.mark.parametrize("program", ["compressed", "modelopt"])
@pytest.mark.parametrize("shape", [(5, 48), (32, 64), (48, 320), (700, 1040)], ids=str)
def test_weights_are_those_of_the_program(program, shape):
    made = tensors(shape, program, seed=shape[0])
    packed = nvfp4.from_checkpoint(checkpoint_of(made), "P")
    assert packed.shape == shape
    assert torch.equal(nvfp4.dequantize(packed, torch.bfloat16), reference(made))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", nvfp4.VARIANTS)
def test_what_is_stored_comes_back(variant, dtype):
    packed = nvfp4.sample((48, 320), 1, scheme=variant)
    made = nvfp4.stored(packed)
    assert {suffix: (each.dtype, tuple(each.shape)) for suffix, each in made.items()} == nvfp4.layout(48, 320, variant)
    found = nvfp4.from_checkpoint(checkpoint_of(made), "P")
    for each in fields(packed):
        mine, theirs = getattr(packed, each.name), getattr(found, each.name)
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    checkpoint = checkpoint_of(made)
    assert owner(checkpoint.tensors, "P" + next(iter(made))) == ("nvfp4", "P")
    assert sum(nvfp4.placed_bytes(checkpoint.tensors, "P")) == packed.nbytes == nvfp4.bytes(48, 320)
    weight = nvfp4.dequantize(packed, dtype)
    assert 0.3 < float(weight.double().square().mean()) * 320 < 3


@pytest.mark.parametrize("variant", nvfp4.VARIANTS)
@pytest.mark.parametrize("shape", [(96, 320), (40, 96)], ids=str)
def test_slabs_of_any_size_give_the_product(variant, shape):
    packed, bias = nvfp4.sample(shape, 3, scheme=variant), torch.randn(shape[0])
    x = torch.randn(11, shape[1])
    expected = F.linear(x, nvfp4.dequantize(packed, torch.float32), bias)
    linear = nvfp4.Linear(packed, bias)
    codes = packed.codes.clone()
    for _ in ("as in the file", "in tiles, where they are whole"):
        assert torch.equal(linear(x), expected)
        assert torch.equal(linear.packed.codes, codes)
        for rows in (16, 48):
            linear.scratch = torch.zeros(4 * shape[1] * rows, dtype=torch.uint8)
            torch.testing.assert_close(linear._by_slabs(x), expected, rtol=1e-5, atol=1e-5)
        linear.tile_()
    assert linear.tiled == nvfp4.fits(*shape, variant) == (shape == (96, 320))


def test_unpacking_is_done_by_the_kernel(monkeypatch):
    reference_kernels.install(monkeypatch)
    packed = nvfp4.sample((96, 320), 3)
    expected = nvfp4.dequantize(packed, torch.float32)[32:64]
    assert torch.equal(nvfp4.Linear(packed).tile_().unpack(32, torch.empty(32, 320)), expected)
    with pytest.raises(ValueError, match="is not in tiles"):
        nvfp4.Linear(packed).unpack(0, torch.empty(96, 320))


DAMAGED = {
    "no scales": (lambda made: made.pop(".weight_scale"), "lacks P.weight_scale"),
    "codes of words": (
        lambda made: made.update({".weight_packed": made[".weight_packed"].int()}), "weight_packed is int32"
    ),
    "half a group": (lambda made: made.update({".weight_packed": made[".weight_packed"][:, :-4]}), "in % 16 == 0"),
    "codes of one size": (lambda made: made.update({".weight_packed": made[".weight_packed"].flatten()}), "expected"),
    "no codes": (lambda made: made.update({".weight_packed": made[".weight_packed"][:0]}), "expected uint8"),
    "scales cut": (
        lambda made: made.update({".weight_scale": made[".weight_scale"][:, :-1].contiguous()}),
        r"weight_scale is float8_e4m3fn \[48, 7\]; expected float8_e4m3fn \[48, 8\]",
    ),
    "scales of floats": (
        lambda made: made.update({".weight_scale": made[".weight_scale"].float()}), "weight_scale is float32"
    ),
    "a scale of NaN": (lambda made: made[".weight_scale"].view(torch.uint8)[7].fill_(0x7F), "NaN or negative"),
    "a negative scale": (lambda made: made[".weight_scale"].view(torch.uint8)[7].fill_(0x81), "NaN or negative"),
    "a global scale of NaN": (lambda made: made[".weight_global_scale"].fill_(torch.nan), "not a positive number"),
    "a global scale of zero": (lambda made: made[".weight_global_scale"].zero_(), "not a positive number"),
    "a negative global scale": (lambda made: made[".weight_global_scale"].neg_(), "not a positive number"),
    "two global scales": (
        lambda made: made.update({".weight_global_scale": torch.ones(2)}), r"is float32 \[2\]; expected float32 \[1\]"
    ),
    "a global scale of bf16": (
        lambda made: made.update({".weight_global_scale": torch.ones(1).bfloat16()}), "weight_global_scale is bfloat16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_layers_are_refused(case):
    damage, why = DAMAGED[case]
    made = tensors((48, 128), "compressed")
    damage(made)
    began = time.monotonic()
    with pytest.raises(LocalqError, match=why) as caught:
        nvfp4.from_checkpoint(checkpoint_of(made), "P")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_logits_are_those_of_the_dequantized_model(tmp_path, kind, model_type):
    packed, plain = nvfp4_checkpoints.write(tmp_path, kind, model_type)
    ids, found = prompt_of(12), []
    for folder in (packed, plain):
        loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="bfloat16"))
        found.append((loaded.format, logits_of(loaded.model, loaded, ids)))
    assert found[0][0] == "nvfp4"
    assert torch.equal(found[0][1], found[1][1])
    offer = uncatalogued.offer(resolve(str(packed)), offline=True)
    assert (offer.format, offer.unsupported) == ("nvfp4", None)


def test_the_description_of_modelopt_may_lie_beside_config_json(tmp_path):
    packed, _ = nvfp4_checkpoints.write(tmp_path, "modelopt")
    config = json.loads((packed / "config.json").read_text())
    stated = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    del stated["quant_method"]
    (packed / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": stated}))
    assert load(open_model(packed), CPU).format == "nvfp4"


OTHERS = {
    "int4": {"quant_algo": "W4A16_AWQ"},
    "pre-scaled": {"quant_algo": "NVFP4_AWQ"},
    "none": {"quant_algo": None},
    "mixed with int4": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
    "mixed without layers": {"quant_algo": "MIXED_PRECISION"},
    "mixed of text": {"quant_algo": "MIXED_PRECISION", "quantized_layers": "x"},
    "a list": {"quant_algo": ["NVFP4"]},
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_algorithms_of_modelopt_are_refused(tmp_path, case):
    if case != "a list":
        assert modelopt.format_of(OTHERS[case]) == modelopt.METHOD
    packed, _ = nvfp4_checkpoints.write(tmp_path, "modelopt")
    config = json.loads((packed / "config.json").read_text())
    stated = {"quant_method": "modelopt", **OTHERS[case]}
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    with pytest.raises(LocalqError, match=r"'modelopt'.*is not supported"):
        load(open_model(packed), CPU)


@pytest.mark.parametrize("change", [{"group_size": 32}, {"num_bits": 8}, {"type": "int"}], ids=str)
def test_nvfp4_of_other_weights_is_refused(change):
    weights = {**nvfp4_checkpoints.WEIGHTS, **change}
    group = {**nvfp4_checkpoints.NVFP4, "weights": weights}
    stated = {**nvfp4_checkpoints.COMPRESSED, "config_groups": {"group_0": group}}
    assert "in layout 'nvfp4-pack-quantized' with unsupported weight settings" in compressed_tensors.unreadable(stated)
    assert compressed_tensors.format_of(stated) == "compressed-tensors"


def test_a_damaged_file_ends_with_its_code(tmp_path):
    packed, _ = nvfp4_checkpoints.write(tmp_path, "compressed")
    held = load_file(packed / "model.safetensors")
    for name, change, why in (
        (f"{UP}.weight_scale", lambda each: each[:, :1].contiguous(), "weight_scale is"),
        (f"{UP}.weight_global_scale", lambda each: None, "unsupported dtype|do not belong|missing"),
    ):
        copied = Path(shutil.copytree(packed, tmp_path / why.split()[0].strip("|")))
        changed = {key: change(each) if key == name else each for key, each in held.items()}
        save_file({key: each for key, each in changed.items() if each is not None}, copied / "model.safetensors")
        began = time.monotonic()
        with pytest.raises(LocalqError, match=why) as caught:
            load(open_model(copied), CPU)
        assert caught.value.exit_code == ExitCode.BAD_FILE
        assert time.monotonic() - began < 1
