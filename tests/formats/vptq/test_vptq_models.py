"""Models whose Linears are in VPTQ: against transformers with the package's weights, packed as on a GPU, hostile files.

transformers runs VPTQ on CUDA only, so its model here has plain Linears that hold what the package dequantizes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from localq.bench.quality import bits
from localq.engine.load import weights
from localq.engine.load.load import load, share_scratch
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles, open_model
from localq.formats import vptq
from localq.formats.dense_checkpoint import dequantized
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import GREEDY, logits_of, prompt_of
from tests.support.engine.packed_models import packed_model
from tests.support.formats.vptq_checkpoints import SCHEMES, write
from tests.support.formats.vptq_layers import Layer, by_package, package_dequant

CPU = LoadOptions(device="cpu", dtype="float32")
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def dequant() -> Callable[..., Tensor]:
    return package_dequant()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every scheme in one model, but for one matrix, which is plain."""
    path = tmp_path_factory.mktemp("vptq")
    write(path, list(SCHEMES.values()), plain="layers.1.mlp.up_proj", num_hidden_layers=2)
    return path


@pytest.fixture
def edit(folder: Path, tmp_path: Path) -> Any:
    """A copy, changed by a function of its tensors and of the blocks of its configuration."""

    def make(change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> ModelFiles:
        made = tmp_path / "edited"
        shutil.copytree(folder, made)
        tensors, config = load_file(made / "model.safetensors"), json.loads((made / "config.json").read_text())
        change(tensors, config["quantization_config"]["config_for_layers"])
        save_file(tensors, made / "model.safetensors")
        (made / "config.json").write_text(json.dumps(config))
        return open_model(made)

    return make


def assert_near(logits: Tensor, expected: Tensor) -> None:
    """They differ by what another order of f32 sums makes; another rounding of the weights makes 1e-3 and more."""
    assert (logits - expected).norm() / expected.norm() < 3e-5


def reference_logits(dequant: Callable[..., Tensor], folder: Path, layers: dict[str, Layer], ids: list[int]) -> Tensor:
    """transformers in float32 with the package's matrices, dequantized in the type of the files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = load_file(folder / "model.safetensors")
    for path, layer in layers.items():
        for suffix in layer.tensors:
            del stored[path + suffix]
        stored[f"{path}.weight"] = by_package(dequant, layer)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_package_s_weights(dequant, tmp_path, name):
    layers = write(tmp_path, [SCHEMES[name]], num_hidden_layers=2)
    loaded, ids = load(open_model(tmp_path), CPU), prompt_of(40)
    assert loaded.format == "vptq"
    assert len(layers) == 14
    assert_near(logits_of(loaded.model, loaded, ids), reference_logits(dequant, tmp_path, layers, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["qwen2", "phi3"])
def test_other_families_and_types_and_schemes_mixed(dequant, tmp_path, model_type, dtype):
    """qwen2 has biases; phi3 has q, k, v and gate, up in one matrix each."""
    layers = write(tmp_path, list(SCHEMES.values()), dtype, model_type, num_hidden_layers=2)
    loaded, ids = load(open_model(tmp_path), CPU), prompt_of(40)
    assert_near(logits_of(loaded.model, loaded, ids), reference_logits(dequant, tmp_path, layers, ids))


def test_what_was_loaded_is_described(folder):
    files = open_model(folder)
    loaded = load(files, CPU)
    assert (loaded.format, loaded.dtype, loaded.head_bits, loaded.notes) == ("vptq", torch.float32, "16", ())
    stored = load_file(folder / "model.safetensors")
    quantized = [each.nbytes for name, each in stored.items() if name.endswith(vptq.suffixes)]
    count = 13 * 192 * 128 - sum(2 * (192 - 128) * 128 + 2 * (192 - 64) * 128 for _ in range(2))
    assert bits.per_weight(files) == 8 * sum(quantized) / count
    dense = load(files, CPU, opened=lambda each: dequantized(open_checkpoint(each), torch.device("cpu"), torch.float32))
    ids = prompt_of(9)
    assert torch.equal(logits_of(dense.model, dense, ids), logits_of(loaded.model, loaded, ids))


def test_the_configuration_of_a_text_model_inside_another():
    quantization = {"quant_method": "vptq"}
    inner = {"model_type": "gemma3", "text_config": {"quantization_config": quantization}}
    assert ModelFiles(Path(), "safetensors", inner).quantization == quantization
    assert ModelFiles(Path(), "safetensors", {"quantization_config": "vptq"}).quantization == {}


# ---- as on a GPU


def test_packed_linears_give_the_same_logits(folder, monkeypatch):
    """What a GPU holds, on the CPU: tensors in one arena, slabs in the shared scratch, the module path for decoding."""
    files = open_model(folder)
    plain = load(files, CPU)
    model, sizes, _ = packed_model(files)
    linears = [module for module in model.modules() if isinstance(module, vptq.Linear)]
    assert len(linears) == 13
    assert isinstance(model.get_submodule("layers.1.mlp.up_proj"), nn.Linear)
    assert sum(sizes) == weights.weight_bytes(model)["weights"]
    assert share_scratch(model, torch.float32) == 4 * 192 * 128
    ids = prompt_of(20)
    expected = logits_of(plain.model, plain, ids)
    assert torch.equal(logits_of(model, plain, ids), expected)
    for linear in linears:
        linear.scratch = linear.scratch[: 4 * 192 * 50]  # slabs of some 50 rows, in whole vectors
        monkeypatch.setattr(linear, "forward", linear._by_slabs)
    assert_near(logits_of(model, plain, ids), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_reply_on_the_gpu(folder):
    from localq.engine.generate import Engine

    files = open_model(folder)
    engine = Engine(load(files, LoadOptions(device="cuda")))
    assert [note for note in engine.notes if "no kernel supports linear layers in VPTQ" in note]
    assert list(engine.generate(prompt_of(50), GREEDY))
    exact, loaded, ids = load(files, CPU), engine.model, prompt_of(50)
    got = logits_of(loaded.model, loaded, ids)
    expected = logits_of(exact.model, exact, ids)
    assert (got.float().cpu() - expected).norm() / expected.norm() < 0.02


# ---- hostile files


def drop(key: str) -> Any:
    return lambda tensors, layers: tensors.pop(key)


def put(key: str, tensor: Tensor) -> Any:
    return lambda tensors, layers: tensors.__setitem__(key, tensor)


def renamed(tensors: dict[str, Tensor], layers: dict[str, Any]) -> None:
    """A block whose name is that of no layer."""
    layers["layers.0.self_attn.q_proj"] = layers.pop(Q)


def swapped(tensors: dict[str, Tensor], layers: dict[str, Any]) -> None:
    """Two blocks in each other's place: the tensors are not what their names say."""
    up = "model.layers.0.mlp.up_proj"
    layers[Q], layers[up] = layers[up], layers[Q]


def shorter(tensors: dict[str, Tensor], layers: dict[str, Any]) -> None:
    """Seven rows fewer: as many vectors, with padding."""
    layers[Q]["out_features"] = 121


DAMAGED = {
    "no indices": (drop(f"{Q}.indices"), r"1 weights are missing \(first: 'layers\.0\.self_attn\.q_proj\.weight'"),
    "no centroids": (drop(f"{Q}.centroids.weight"), r"weights are missing \(first: 'layers\.0\.self_attn\.q_proj"),
    "no block": (lambda tensors, layers: layers.pop(Q), rf"{Q}: .* in config\.json has no entry for this layer"),
    "a block of another name": (renamed, rf"{Q}: .* in config\.json has no entry for this layer"),
    "blocks in each other's place": (swapped, r"'model\.layers\.0\.\S+_proj' has shape"),
    "another shape": (shorter, r"shape \[121, 128\], not \[128, 128\]"),
    "plain and quantized": (put(f"{Q}.weight", torch.zeros(128, 128)), "another tensor both map to 'layers.0"),
    "a stray codebook": (put(f"{UP}.centroids.weight", torch.zeros(1, 64)), "do not belong to this architecture"),
    "a stray permutation": (put(f"{UP}.perm", torch.zeros(128)), "do not belong to this architecture"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(edit, case):
    change, why = DAMAGED[case]
    with pytest.raises(LocalqError, match=why) as caught:
        load(edit(change), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE
