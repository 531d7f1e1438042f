"""Models whose Linears are in vq2: against transformers with the page's matrices, packed as on a GPU, hostile files."""

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
from localq.engine.load.shared import SharedTensors
from localq.engine.step import fused
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles, open_model
from localq.formats.codebooks import vq2
from localq.formats.codebooks.vq2 import Packed
from localq.formats.dense_checkpoint import dequantized
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import GREEDY, logits_of, prompt_of
from tests.support.engine.packed_models import packed_model
from tests.support.formats.vq2_checkpoints import exact, write

CPU = LoadOptions(device="cpu", dtype="float32")
UP, Q = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"
BOOK = 2 * 256 * 16  # bytes of a codebook of 16 weights


def of_layer(path: str) -> str | None:
    """q, k, v and o of a block share, down has its own, the others of the model share."""
    if path.endswith("down_proj"):
        return None
    return path.rpartition(".")[0] if "self_attn" in path else "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two books, rotated, codebooks of every level, and one matrix that is plain."""
    path = tmp_path_factory.mktemp("vq2")
    write(path, "s4l16+s8l16", home=of_layer, plain=("layers.1.mlp.up_proj", "lm_head"), num_hidden_layers=2)
    return path


@pytest.fixture
def edit(folder: Path, tmp_path: Path) -> Any:
    """A copy, changed by a function of its tensors."""

    def make(change: Any) -> ModelFiles:
        made = tmp_path / "edited"
        shutil.copytree(folder, made)
        tensors = load_file(made / "model.safetensors")
        change(tensors)
        save_file(tensors, made / "model.safetensors")
        return open_model(made)

    return make


def assert_near(logits: Tensor, expected: Tensor) -> None:
    """They differ by what another order of f32 sums makes; another rounding of the weights makes 1e-3 and more."""
    assert (logits - expected).norm() / expected.norm() < 3e-5


def reference_logits(folder: Path, matrices: dict[str, Packed], ids: list[int]) -> Tensor:
    """transformers in float32 with plain Linears that hold the matrices of the format's page."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = load_file(folder / "model.safetensors")
    stored = {name: each for name, each in stored.items() if not name.endswith(vq2.suffixes)}
    stored |= {f"{path}.weight": exact(packed) for path, packed in matrices.items()}
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize(
    ("model_type", "scheme", "home"),
    [
        ("qwen2", "s4l16", lambda path: None),  # has biases
        ("qwen2", "s4l16+s8l32", of_layer),
        ("llama", "s2l6", lambda path: "model"),
        ("phi3", "s4l16+s16l16", of_layer),  # q, k, v and gate, up in one matrix each
    ],
)
def test_logits_are_those_of_the_page_s_matrices(tmp_path, model_type, scheme, home, signs):
    matrices = write(tmp_path, scheme, model_type, signs=signs, home=home, num_hidden_layers=2)
    loaded, ids = load(open_model(tmp_path), CPU), prompt_of(40)
    assert loaded.format == "vq2"
    assert len(matrices) == (8 if model_type == "phi3" else 14)
    assert_near(logits_of(loaded.model, loaded, ids), reference_logits(tmp_path, matrices, ids))


def test_what_was_loaded_is_described(folder):
    files = open_model(folder)
    loaded = load(files, CPU)
    assert (loaded.format, loaded.dtype, loaded.head_bits, loaded.notes) == ("vq2", torch.float32, "16", ())
    stored = load_file(folder / "model.safetensors")
    quantized = [each.nbytes for name, each in stored.items() if name.endswith(vq2.suffixes)]
    assert len(quantized) == 4 * 13 + 2 * (1 + 2 + 2)  # codes, scales, signs; codebooks of the model, attention, down
    count = 13 * 192 * 128 - sum(2 * (192 - 128) * 128 + 2 * (192 - 64) * 128 for _ in range(2))
    assert bits.per_weight(files) == 8 * sum(quantized) / count
    dense = load(files, CPU, opened=lambda each: dequantized(open_checkpoint(each), torch.device("cpu"), torch.float32))
    ids = prompt_of(9)
    assert torch.equal(logits_of(dense.model, dense, ids), logits_of(loaded.model, loaded, ids))


def test_a_head_is_dequantized_and_reads_a_codebook_of_its_own(tmp_path):
    matrices = write(tmp_path, plain=("\n",), home=lambda path: None if path == "lm_head" else "model")
    loaded, ids = load(open_model(tmp_path), CPU), prompt_of(9)
    assert loaded.head_bits == "16"
    assert "lm_head" in matrices
    assert_near(logits_of(loaded.model, loaded, ids), reference_logits(tmp_path, matrices, ids))


# ---- as on a GPU


def test_packed_linears_give_the_same_logits(folder, monkeypatch):
    """Slabs in the shared scratch, the module path for decoding, a rotation of x instead of one of the weights."""
    plain = load(open_model(folder), CPU)
    model, sizes, _ = packed_model(open_model(folder))
    linears = [module for module in model.modules() if isinstance(module, vq2.Linear)]
    assert len(linears) == 13
    assert isinstance(model.get_submodule("layers.1.mlp.up_proj"), nn.Linear)
    assert sum(sizes) == weights.weight_bytes(model)["weights"]
    assert share_scratch(model, torch.float32) == 4 * 192 * 128
    assert len({linear.scratch.data_ptr() for linear in linears}) == 1
    ids = prompt_of(20)
    expected = logits_of(plain.model, plain, ids)
    assert_near(logits_of(model, plain, ids), expected)
    for linear in linears:
        linear.scratch = linear.scratch[: 4 * 192 * 50]  # slabs of 50 or 75 rows
    assert_near(logits_of(model, plain, ids), expected)
    model.half()
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    assert fused.why_not(model) == "no kernel supports linear layers in vq2 with 128 columns"


def test_a_shared_codebook_is_at_one_place_and_the_arena_is_full(folder):
    model, sizes, places = packed_model(open_model(folder))
    with pytest.raises(ValueError, match="0 bytes are left"):
        places.block(torch.ones(1))
    codebooks = {
        name: getattr(module, part)
        for name, module in model.named_modules()
        if isinstance(module, vq2.Linear)
        for part in ("codebook",)
    }
    of_attention = {id(codebooks[f"layers.0.self_attn.{name}_proj"]) for name in "qkvo"}
    of_model = {id(codebooks[name]) for name in codebooks if name.endswith(("gate_proj", "up_proj"))}
    assert (len(of_attention), len(of_model)) == (1, 1)
    assert len({id(each) for each in codebooks.values()}) == 1 + 2 + 2
    assert sizes.count(BOOK) == 2 * (1 + 2 + 2)


def test_what_is_planned_is_what_is_allocated(folder):
    """On the CPU, where matrices are dequantized, and with the exact bytes of packed ones."""
    loaded = load(open_model(folder), CPU)
    planned = loaded.plan.ledger.components
    for component in ("weights", "embedding", "head", "kv_cache"):
        assert planned[component] == loaded.ledger[component], component


def test_what_is_shared_is_read_once(folder):
    with open_checkpoint(open_model(folder)) as checkpoint:
        shared = SharedTensors(checkpoint, ["model.codebook"])
        first = shared.checkpoint.read("model.codebook")
        assert shared.checkpoint.read("model.codebook") is first
        other = shared.checkpoint.read("model.codebook_2")
        copied = shared.once(torch.clone)
        assert copied(first) is copied(first) is shared.once(torch.clone)(first)
        assert copied(other) is not copied(other)


@pytest.mark.cuda
@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
def test_a_reply_on_the_gpu(tmp_path, signs):
    from localq.engine.generate import Engine

    write(tmp_path, "s4l16+s8l16", signs=signs, home=of_layer, num_hidden_layers=2)
    files = open_model(tmp_path)
    engine = Engine(load(files, LoadOptions(device="cuda")))
    assert list(engine.generate(prompt_of(50), GREEDY))
    exactly, loaded, ids = load(files, CPU), engine.model, prompt_of(50)
    got = logits_of(loaded.model, loaded, ids)
    expected = logits_of(exactly.model, exactly, ids)
    assert (got.float().cpu() - expected).norm() / expected.norm() < 0.05


# ---- hostile files


def drop(*keys: str) -> Any:
    return lambda tensors: [tensors.pop(key) for key in keys]


def put(key: str, tensor: Tensor) -> Any:
    return lambda tensors: tensors.__setitem__(key, tensor)


def bytes_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


DAMAGED = {
    "no scales": (drop(f"{Q}.scales"), rf"{Q}: the checkpoint lacks {Q}\.scales"),
    "no codebook": (drop("model.layers.0.self_attn.codebook", "model.codebook"), r"lacks .*_proj\.codebook, and "),
    "no codes": (drop(f"{Q}.codes"), r"1 weights are missing \(first: 'layers\.0\.self_attn\.q_proj\.weight'"),
    "signed codes": (put(f"{Q}.codes", bytes_of(128, 32).view(torch.int8)), r"do not belong to this"),
    "too few columns": (put(f"{Q}.codes", bytes_of(128, 31)), r"codes is uint8 \[128, 31\]"),
    "too few rows": (put(f"{Q}.codes", bytes_of(120, 32)), r"_proj' has shape \[120, 128\], not \[128, 128\]"),
    "plain and quantized": (put(f"{Q}.weight", torch.zeros(128, 128)), "another tensor both map to 'layers.0"),
    "a quantized norm": (put("model.norm.codes", bytes_of(8, 8)), "another tensor both map to"),
    "a stray codebook": (put("model.layers.1.mlp.up_proj.codebook", torch.zeros(256, 16)), "do not belong to this"),
    "a codebook that nothing reads": (put("model.layers.codebook_3", torch.zeros(256, 16)), "do not belong to this"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(edit, case):
    change, why = DAMAGED[case]
    with pytest.raises(LocalqError, match=why) as caught:
        load(edit(change), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_a_configuration_that_lies_is_found_out(folder, tmp_path):
    """Twice the columns: every stride would be twice as large, and the matrices none of this model."""
    made = tmp_path / "lies"
    shutil.copytree(folder, made)
    config = json.loads((made / "config.json").read_text())
    config |= {"hidden_size": 256, "head_dim": 64}
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(LocalqError) as caught:
        load(open_model(made), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE
