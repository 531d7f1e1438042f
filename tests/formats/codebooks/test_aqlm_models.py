"""Models whose Linears are in AQLM: against transformers with the package, packed as on a GPU, and hostile files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from localq.bench.quality import bits
from localq.engine.load import weights
from localq.engine.load.load import load, share_scratch
from localq.engine.step import fused
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats.codebooks import aqlm
from localq.formats.dense_checkpoint import dequantized
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.engine.packed_models import packed_model
from tests.support.formats import aqlm_package
from tests.support.formats.aqlm_checkpoints import LAYOUTS, write

CPU = LoadOptions(device="cpu", dtype="float32")
UP, Q = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """2x8 in float16, but for one matrix, which is plain."""
    return write(tmp_path_factory.mktemp("2x8"), LAYOUTS["2x8g8"], plain=("layers.1.mlp.up_proj",), num_hidden_layers=2)


@pytest.fixture
def edit(folder, tmp_path) -> Any:
    """A copy, changed by a function of its tensors and its configuration."""

    def make(change: Any) -> Any:
        made = tmp_path / "edited"
        shutil.copytree(folder, made)
        tensors, config = load_file(made / "model.safetensors"), json.loads((made / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, made / "model.safetensors")
        (made / "config.json").write_text(json.dumps(config))
        return open_model(made)

    return make


def assert_near(logits: Tensor, expected: Tensor) -> None:
    """They differ by what another order of f32 sums makes; another rounding of the weights makes 1e-3 and more."""
    assert (logits - expected).norm() / expected.norm() < 3e-5


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_transformers_with_the_package(tmp_path, name):
    write(tmp_path, LAYOUTS[name], torch.float32, num_hidden_layers=2)
    loaded, ids = load(open_model(tmp_path), CPU), prompt_of(40)
    assert loaded.format == "aqlm"
    expected = aqlm_package.logits(tmp_path, ids, quantized=14)
    assert_near(logits_of(loaded.model, loaded, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3"])
def test_16_bit_files_are_the_matrices_of_the_package_in_float32(tmp_path, model_type, dtype):
    """transformers with plain Linears that hold what the package dequantizes in the type of the files.

    One codebook: bfloat16 sums of more differ from the package's on a CPU in ties. qwen2 has biases; phi3 has q, k, v
    and gate, up in one matrix each.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    write(tmp_path, LAYOUTS["1x8g8"], dtype, model_type, num_hidden_layers=2)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith(".codes")]:
        prefix = name.removesuffix(".codes")
        parts = [stored.pop(prefix + suffix) for suffix in aqlm.suffixes]
        stored[f"{prefix}.weight"] = aqlm_package.dequantized(*parts)
    config = AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    loaded, ids = load(open_model(tmp_path), CPU), prompt_of(40)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert_near(logits_of(loaded.model, loaded, ids), expected)


def test_what_was_loaded_is_described(folder):
    files = open_model(folder)
    loaded = load(files, CPU)
    assert (loaded.format, loaded.dtype, loaded.head_bits, loaded.notes) == ("aqlm", torch.float32, "16", ())
    stored = load_file(folder / "model.safetensors")
    quantized = [each.nbytes for name, each in stored.items() if name.endswith(aqlm.suffixes)]
    assert len(quantized) == 3 * 13
    count = 13 * 192 * 128 - sum(2 * (192 - 128) * 128 + 2 * (192 - 64) * 128 for _ in range(2))
    assert bits.per_weight(files) == 8 * sum(quantized) / count
    dense = load(files, CPU, opened=lambda each: dequantized(open_checkpoint(each), torch.device("cpu"), torch.float32))
    ids = prompt_of(9)
    assert torch.equal(logits_of(dense.model, dense, ids), logits_of(loaded.model, loaded, ids))


def test_sizes_are_those_of_the_tensors_whatever_the_configuration_says(edit, folder):
    def change(tensors: Any, config: Any) -> None:
        config["quantization_config"] |= {"nbits_per_codebook": 16, "num_codebooks": 1, "in_group_size": 16}
        config["quantization_config"]["linear_weights_not_to_quantize"] = [f"{Q}.weight"]

    ids = prompt_of(9)
    loaded, plain = load(edit(change), CPU), load(open_model(folder), CPU)
    assert torch.equal(logits_of(loaded.model, loaded, ids), logits_of(plain.model, plain, ids))


def test_old_files_that_say_nothing_of_quantization(edit):
    def change(tensors: Any, config: Any) -> None:
        config["aqlm"] = config.pop("quantization_config")  # and code of their own, which is never executed

    assert load(edit(change), CPU).format == "aqlm"


def test_a_quantized_head_is_dequantized(edit, folder):
    def change(tensors: Any, config: Any) -> None:
        head = tensors.pop("lm_head.weight")
        codebook = torch.zeros(1, 4096, 1, 16).half()
        codebook[0, : 320 * 8] = head.view(-1, 1, 16)  # every group of 16 columns is a codeword
        tensors["lm_head.codes"] = torch.arange(320 * 8).to(torch.int16).view(320, 8, 1)
        tensors |= {"lm_head.codebooks": codebook, "lm_head.scales": torch.ones(320, 1, 1, 1).half()}

    files = edit(change)
    loaded, plain = load(files, CPU), load(open_model(folder), CPU)
    assert loaded.head_bits == "16"
    assert torch.equal(loaded.model.lm_head.weight, plain.model.lm_head.weight)
    with pytest.raises(LocalqError, match="the output head is stored as AQLM, not as 8-bit") as caught:
        load(files, LoadOptions(device="cpu", dtype="float32", head="8"))
    assert caught.value.exit_code == ExitCode.USAGE


# ---- as on a GPU


def test_packed_linears_give_the_same_logits(folder, monkeypatch):
    """What a GPU holds, on the CPU: tensors in one arena, slabs in the shared scratch, the module path for decoding."""
    files = open_model(folder)
    plain = load(files, CPU)
    model, sizes, _ = packed_model(files)
    linears = [module for module in model.modules() if isinstance(module, aqlm.Linear)]
    assert len(linears) == 13
    assert isinstance(model.get_submodule("layers.1.mlp.up_proj"), nn.Linear)
    assert sum(sizes) == weights.weight_bytes(model)["weights"]
    assert share_scratch(model, torch.float32) == 4 * 192 * 128
    assert len({linear.scratch.data_ptr() for linear in linears}) == 1
    ids = prompt_of(20)
    expected = logits_of(plain.model, plain, ids)
    assert torch.equal(logits_of(model, plain, ids), expected)
    for linear in linears:
        linear.scratch = linear.scratch[: 4 * 192 * 50]  # slabs of 50 or 75 rows
        monkeypatch.setattr(linear, "forward", linear._by_slabs)
    assert_near(logits_of(model, plain, ids), expected)
    model.half()
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    assert fused.why_not(model) == "no kernel supports linear layers in AQLM with 128 columns"


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["1x16g8", "2x8g8", "8x8g32"])
def test_a_reply_on_the_gpu(tmp_path, name):
    from localq.engine.generate import Engine
    from tests.support.engine.engine_runs import GREEDY

    write(tmp_path, LAYOUTS[name], num_hidden_layers=2)
    files = open_model(tmp_path)
    engine = Engine(load(files, LoadOptions(device="cuda")))
    slow = [note for note in engine.notes if "no kernel supports linear layers in AQLM" in note]
    assert bool(slow) == (name == "8x8g32")
    assert list(engine.generate(prompt_of(50), GREEDY))
    exact, loaded, ids = load(files, CPU), engine.model, prompt_of(50)
    got = logits_of(loaded.model, loaded, ids)
    expected = logits_of(exact.model, exact, ids)
    assert (got.float().cpu() - expected).norm() / expected.norm() < 0.05


# ---- hostile files


def drop(key: str) -> Any:
    return lambda tensors, config: tensors.pop(key)


def put(key: str, tensor: Tensor) -> Any:
    return lambda tensors, config: tensors.__setitem__(key, tensor)


DAMAGED = {
    "no scales": (drop(f"{Q}.scales"), rf"{Q}: the checkpoint lacks {Q}\.scales"),
    "no codebooks": (drop(f"{Q}.codebooks"), rf"{Q}: the checkpoint lacks {Q}\.codebooks"),
    "no codes": (drop(f"{Q}.codes"), r"1 weights are missing \(first: 'layers\.0\.self_attn\.q_proj\.weight'"),
    "codes of another type": (put(f"{Q}.codes", torch.zeros(128, 16, 2)), "codes are float32"),
    "fewer columns": (put(f"{Q}.codes", torch.zeros(128, 15, 2, dtype=torch.int8)), r"has shape \[128, 120\], not"),
    "plain and quantized": (put(f"{Q}.weight", torch.zeros(128, 128)), "another tensor both map to 'layers.0"),
    "a quantized norm": (put("model.norm.codes", torch.zeros(8, 8, 2, dtype=torch.int8)), "another tensor both map to"),
    "a stray codebook": (put(f"{UP}.codebooks", torch.zeros(2, 256, 1, 8)), "do not belong to this architecture"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(edit, case):
    change, why = DAMAGED[case]
    with pytest.raises(LocalqError, match=why) as caught:
        load(edit(change), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("method", ["quip", ["aqlm"], {"aqlm": 1}, 7, None])
def test_other_methods_are_refused_by_name(edit, method):
    def change(tensors: Any, config: Any) -> None:
        config["quantization_config"]["quant_method"] = method

    with pytest.raises(LocalqError, match=r"which is not supported\. Use nf4, mxfp4, aqlm"):
        load(edit(change), CPU)


def test_pickles_are_refused(folder, tmp_path):
    made = tmp_path / "pickles"
    shutil.copytree(folder, made)
    (made / "model.safetensors").rename(made / "pytorch_model.bin")
    with pytest.raises(LocalqError, match=r"pickle files \(pytorch_model\.bin\)") as caught:
        open_model(made)
    assert caught.value.exit_code == ExitCode.BAD_FILE
