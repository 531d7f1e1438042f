"""FP8 of compressed-tensors, read as `formats.fp8_source` reads FP8: scales per matrix, per row and per block."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.catalog import resolve
from localq.files.model_folder import open_model
from localq.formats import fp8_source
from localq.planner import uncatalogued
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats import expert_checkpoints
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = LoadOptions(device="cpu", dtype="float32")
Q = "model.layers.0.self_attn.q_proj"
STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "block": {"strategy": "block", "block_structure": [64, 32]},
}


def config_of(strategy: str, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **STRATEGIES[strategy]}
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, **fields}  # fmt: skip


def scales_of(weight: Tensor, strategy: str, dtype: torch.dtype) -> Tensor:
    """Of each matrix [1], row [out, 1] or block; some are negative."""
    rows, columns = weight.shape
    shape = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 64), -(-columns // 32))}[strategy]
    torch.manual_seed(rows)
    return ((0.5 + torch.rand(shape)) * (torch.randint(0, 2, shape) * 2 - 1) * 1e-3).to(dtype)


def decompressed(codes: Tensor, scales: Tensor, strategy: str) -> Tensor:
    """By the package."""
    from compressed_tensors.compressors import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=config_of(strategy)["config_groups"]["group_0"]["weights"])
    found: Tensor = NaiveQuantizationCompressor.decompress({"weight": codes, "weight_scale": scales}, scheme)["weight"]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_are_those_of_the_package(strategy, dtype):
    codes = (100 * torch.randn(128, 96)).to(torch.float8_e4m3fn)
    scales = scales_of(codes, strategy, dtype)
    tensors = {"P.weight": codes, "P.weight_scale": scales}
    found = fp8_source.find(described(tensors), {"weight_block_size": [64, 32]}, "a model")["P.weight"]
    weight = fp8_source.dequantize(codes, scales, found.block, dtype)
    assert torch.equal(weight, decompressed(codes, scales, strategy))


def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    from localq.formats.checkpoint import info

    return {name: info(each.dtype, tuple(each.shape)) for name, each in tensors.items()}


def write(folder: Path, strategy: str) -> tuple[Path, Path]:
    """(a tiny model in FP8, the same dequantized), in `folder`."""
    source = make_checkpoint(folder / "source", "llama", num_hidden_layers=1, initializer_range=0.15)
    plain = expert_checkpoints.read(source)
    stored = dict(plain)
    for name, weight in stored.copy().items():
        if weight.dim() < 2 or ".layers." not in name:
            continue
        codes = (1000 * weight.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = scales_of(codes, strategy, torch.float32)
        plain[name] = decompressed(codes, scales, strategy)
        stored |= {name: codes, f"{name}_scale": scales, f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
    packed = expert_checkpoints.write(folder / "fp8", stored, source, quantization_config=config_of(strategy))
    return packed, expert_checkpoints.write(folder / "plain", plain, source)


def restate(folder: Path, stated: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logits_are_those_of_the_dequantized_model(tmp_path, strategy):
    ids, found = prompt_of(12), []
    for folder in write(tmp_path, strategy):
        loaded = load(open_model(folder), CPU)
        found.append((loaded.format, logits_of(loaded.model, loaded, ids)))
    assert [format for format, _ in found] == ["fp8", "bf16"]
    assert torch.equal(found[0][1], found[1][1])
    offer = uncatalogued.offer(resolve(str(tmp_path / "fp8")), offline=True)
    assert (offer.format, offer.unsupported) == ("fp8", None)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors with sparse weights"),
    "rotated": ({"transform_config": {"config_groups": {"R1": {}}}}, "compressed-tensors with rotated inputs"),
    "mxfp8": ({"format": "mxfp8-quantized"}, "in layout 'mxfp8-quantized'"),
}
DAMAGED = {
    "no scales": (lambda held: held.pop(f"{Q}.weight_scale"), "FP8 values but no scales"),
    "half the scales": (
        lambda held: held.update({f"{Q}.weight_scale": held[f"{Q}.weight_scale"][:64]}),
        r"scales have shape \[64, 1\]",
    ),
    "scales of integers": (
        lambda held: held.update({f"{Q}.weight_scale": held[f"{Q}.weight_scale"].int()}), "FP8 values but no scales"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sound"), "channel")[0]


@pytest.mark.parametrize("case", REFUSED)
def test_other_variants_are_refused_by_name(sound, tmp_path, case):
    fields, why = REFUSED[case]
    shutil.copytree(sound, tmp_path / "m")
    restate(tmp_path / "m", config_of("channel", **fields))
    with pytest.raises(LocalqError, match=why) as caught:
        load(open_model(tmp_path / "m"), CPU)
    assert caught.value.exit_code == ExitCode.FAILURE


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(sound, tmp_path, case):
    change, why = DAMAGED[case]
    shutil.copytree(sound, tmp_path / "m")
    held = load_file(tmp_path / "m" / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "m" / "model.safetensors")
    begin = time.monotonic()
    with pytest.raises(LocalqError, match=why) as caught:
        load(open_model(tmp_path / "m"), CPU)
    assert time.monotonic() - begin < 1
    assert caught.value.exit_code == ExitCode.BAD_FILE
