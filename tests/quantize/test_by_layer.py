"""Whole models become vq2: what is loaded from the folder computes what the encoder measured while it made it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localq import kernels
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.files.stored_format import scheme_of
from localq.formats.codebooks import vq2
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import ARCHITECTURES
from localq.quantize import by_layer
from localq.quantize.model.source import SourceModel
from localq.quantize.output.tensor_jobs import is_block_linear
from localq.quantize.settings import Tuning
from localq.text.tokenizer import Tokenizer
from tests.support.models.tiny_case import MUSE_TOWER
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests, quantized
from tests.support.quantize.vq2_conversions import Made, converted, ended, loaded, logits, request, watched, windows

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),  # biases
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {}),  # fused
    "smollm3": ("smollm3", {}),
    "qwen3_5": ("qwen3_5_text", {"tie_word_embeddings": True}),  # gated delta nets, norms of 1 + weight
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),  # and a shared expert
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),  # the stream stays, inputs are rotated
    "gemma3": ("gemma3_text", {}),
    "gemma4": ("gemma4_text", {}),  # heads of two sizes, values made from keys, a scalar
    "ministral3": ("ministral3", {}),  # queries that grow
    "lfm2": ("lfm2", {"tie_word_embeddings": True}),  # short convolutions
    "lfm2_moe": ("lfm2_moe", {}),  # and experts chosen by sigmoids, in some layers
    "granite": ("granite", {}),  # the stream is divided
    "olmo3": ("olmo3", {"sliding_window": 16}),  # norms behind only, of q and k over all heads
    "muse": ("muse_glimmer", {**MUSE_TOWER, "text_config": {
        "model_type": "muse_glimmer_text", "sliding_window": 16, "output_multiplier": 0.6, "initializer_range": 0.08}}),
}  # fmt: skip
DENSE = (".weight", ".bias", ".expert_bias", ".A_log", ".dt_bias", ".layer_scalar")
UNTURNED = ("gemma2", "gemma3", "gemma4", "muse", "olmo3")
ROUNDING = 1e-5  # of f32, relative to the largest logit: sums of 192 terms, one layer after another


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    torch.set_num_threads(1)

    @functools.cache
    def make(name: str) -> Path:
        model_type, changes = FAMILIES[name]
        folder = tmp_path_factory.mktemp("source") / name
        # weights large enough that what becomes of them is seen behind them
        return make_checkpoint(folder, model_type, dtype=torch.float32, initializer_range=0.08, **changes)

    return make


@pytest.fixture(scope="module")
def made_of(source_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return functools.cache(lambda name: watched(source_of(name), tmp_path_factory.mktemp("out") / name))


every_family = pytest.mark.parametrize("name", FAMILIES)


# ---- what the result computes


@every_family
def test_the_folder_computes_what_the_encoder_measured(source_of, made_of, name: str) -> None:
    made = made_of(name)
    source, result = loaded(source_of(name)), loaded(made.folder)
    assert result.format == "vq2"
    for index in (0, 5):
        text = windows()[index]
        of_source, of_result = logits(source, text), logits(result, text)
        scale = of_source.abs().max() * ROUNDING
        # the full stream is the source's, turned with the head; the quantized stream is that of the files
        assert (ended(result, made.streams.full[index]) - of_source).abs().max() <= scale
        assert (ended(result, made.streams.x[index]) - of_result).abs().max() <= scale
    assert 0 < made.streams.drift() < 1


@every_family
def test_it_is_nearer_to_its_source_than_the_best_scalar_of_2_bits(source_of, made_of, tmp_path, name: str) -> None:
    rounded = tmp_path / "rounded"
    shutil.copytree(source_of(name), rounded)
    for shard in rounded.glob("*.safetensors"):
        save_file({key: _two_bits(key, each) for key, each in load_file(shard).items()}, shard, {"format": "pt"})
    exact, scalar, ours = (loaded(each) for each in (source_of(name), rounded, made_of(name).folder))
    errors = [
        sum(float((logits(model, text) - logits(exact, text)).square().sum()) for text in windows())
        for model in (ours, scalar)
    ]
    # Gaussian weights: 4 levels leave 11.7 % of their energy (Max 1960), overlapping codewords 7.9 %; the text helps
    assert errors[0] < errors[1] * 0.079 / 0.117


def _two_bits(name: str, tensor: Tensor) -> Tensor:
    if not is_block_linear(name, tuple(tensor.shape)):
        return tensor
    levels = torch.tensor([-1.5104, -0.4528, 0.4528, 1.5104]) * tensor.square().mean().sqrt()
    return levels[torch.bucketize(tensor, (levels[1:] + levels[:-1]) / 2)].contiguous()


def test_more_bits_are_nearer_and_known_by_their_shapes(source_of, tmp_path) -> None:
    source = source_of("llama")
    exact, errors = loaded(source), []
    for scheme in ("s4l16", "s4l16+s16l16", "s4l16+s8l16", "s4l16+s4l16"):
        folder = converted(source, tmp_path / scheme, scheme=scheme)
        assert scheme_of(open_model(folder)) == scheme
        result = loaded(folder)
        errors.append(sum(float((logits(result, text) - logits(exact, text)).square().sum()) for text in windows()))
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < errors[0] / 4  # two bits more: 16 times less energy of errors where nothing is lost


def test_a_seed_of_its_own_makes_other_codes_of_the_same_model(source_of, made_of, tmp_path) -> None:
    other = converted(source_of("llama"), tmp_path / "out", seed=3)
    before, after = (load_file(next(each.glob("*-00002-*"))) for each in (made_of("llama").folder, other))
    name = "model.layers.0.mlp.down_proj.codes"
    assert (before[name] != after[name]).float().mean() > 0.9
    exact = logits(loaded(source_of("llama")), windows()[0])
    assert (logits(loaded(other), windows()[0]) - exact).norm() < exact.norm()


# ---- what is in the folder


@every_family
def test_every_linear_is_quantized_and_nothing_is_missing(source_of, made_of, name: str) -> None:
    files = open_model(made_of(name).folder)
    with open_checkpoint(open_model(source_of(name))) as source, open_checkpoint(files) as result:
        linears = [_written(name, key) for key, each in source.tensors.items() if is_block_linear(key, each.shape)]
        assert all(vq2.is_quantized(result.tensors, prefix) for prefix in linears)
        assert not any(f"{prefix}.weight" in result.tensors for prefix in linears)
        signed = {key.rpartition(".")[0].rpartition(".")[2] for key in result.tensors if key.endswith(".signs")}
        readers = {prefix.rpartition(".")[2] for prefix in linears} - {"o_proj", "out_proj"}
        assert signed == (readers if name in UNTURNED else readers & {"down_proj", "w2"})
        dense = {key for key in source.tensors if not is_block_linear(key, source.tensors[key].shape)}
        turned_head = set() if name in UNTURNED else {"lm_head.weight"}
        assert {key for key in result.tensors if key.endswith(DENSE)} == dense | turned_head
    assert files.config["tie_word_embeddings"] == (name in ("gemma2", "gemma4"))
    assert files.config["quantization_config"]["quant_method"] == "localq_vq2"


def _written(name: str, key: str) -> str:
    """The prefix that codes of a matrix have: of an LFM2 by the names of the model, not those of its source."""
    if not name.startswith("lfm2") or ".experts." in key:
        return key.removesuffix(".weight")
    return f"model.{ARCHITECTURES[name].rename(key)}".removesuffix(".weight")


def test_tokenizer_template_and_stop_tokens_come_along(source_of, made_of) -> None:
    before, after = open_model(source_of("llama")), open_model(made_of("llama").folder)
    assert after.eos_ids == before.eos_ids == (258, 256)
    assert after.chat_template == before.chat_template
    assert after.generation_config == before.generation_config
    text = "the thing <|im_end|> in an"
    assert Tokenizer.load(after).encode(text) == Tokenizer.load(before).encode(text)
    same = {key: value for key, value in after.config.items() if key != "quantization_config"}
    assert same == {**before.config, "tie_word_embeddings": False}


def test_twice_gives_the_same_bytes(source_of, made_of, tmp_path) -> None:
    for name in ("qwen2", "gemma2"):
        assert digests(converted(source_of(name), tmp_path / name)) == digests(made_of(name).folder)


# ---- sources that have lost something already


def _notes(source: Path, out: Path, **changes: Any) -> list[str]:
    notes: list[str] = []
    by_layer.convert(request(source, out, **changes), say=notes.append)
    return notes


def test_full_precision_needs_no_note(source_of, tmp_path) -> None:
    assert _notes(source_of("llama-tied"), tmp_path / "out") == []


def test_nf4_weights_are_dequantized_and_said_to_be(tmp_path) -> None:
    source = quantized(make_checkpoint(tmp_path / "dense", "llama", initializer_range=0.08), tmp_path / "nf4")
    (note,) = _notes(source, tmp_path / "out")
    assert "already quantized (4-bit nf4)" in note
    result, exact = loaded(tmp_path / "out"), loaded(source)
    assert result.format == "vq2"
    text = windows()[0]
    assert (logits(result, text) - logits(exact, text)).norm() < 0.5 * logits(exact, text).norm()
    with open_checkpoint(open_model(tmp_path / "out")) as checkpoint:
        assert not any(".absmax" in name or ".quant_map" in name for name in checkpoint.tensors)


def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path) -> None:
    from tests.support.files.tiny_gguf_models import write_with_tokenizer

    source = write_with_tokenizer(tmp_path / "tiny.gguf", "Q8_0")
    (note,) = _notes(source, tmp_path / "out", windows=windows(vocab=131))
    assert "-bit gguf)" in note
    result, exact = loaded(tmp_path / "out"), loaded(source)
    text = windows(vocab=131)[0]
    assert (logits(result, text) - logits(exact, text)).norm() < 0.5 * logits(exact, text).norm()
    before, after = Tokenizer.load(open_model(source)), Tokenizer.load(open_model(tmp_path / "out"))
    assert after.encode("abc def") == before.encode("abc def")
    assert open_model(tmp_path / "out").eos_ids == open_model(source).eos_ids
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


# ---- what is refused


def _refused(why: str, code: ExitCode, source: Path, out: Path, **changes: Any) -> LocalqError:
    with pytest.raises(LocalqError, match=why) as caught:
        converted(source, out, **changes)
    assert caught.value.exit_code == code
    return caught.value


def test_what_is_asked_for_and_is_not_there(source_of, made_of, tmp_path) -> None:
    llama, out = source_of("llama"), tmp_path / "out"
    _refused("shorter than one window", ExitCode.USAGE, llama, out, windows=[])
    _refused("not a valid vq2 scheme", ExitCode.USAGE, llama, out, scheme="s5l16")
    _refused("no initial codebooks", ExitCode.USAGE, llama, out, scheme="s2l16")
    _refused("already quantized .vq2", ExitCode.USAGE, made_of("llama").folder, out)
    assert not out.exists()


def test_rows_that_are_no_multiple_of_16_long(tmp_path) -> None:
    source = make_checkpoint(tmp_path / "m", "llama", intermediate_size=200)
    error = _refused("200 weights", ExitCode.USAGE, source, tmp_path / "out")
    assert "mlp.down_proj" in error.why


def test_an_unknown_architecture_is_named(source_of, tmp_path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(source_of("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    _refused("'mamba' is not supported", ExitCode.FAILURE, folder, tmp_path / "out")


@pytest.mark.parametrize("key", ["model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"])
def test_weights_that_are_not_finite_are_named(tmp_path, key: str) -> None:
    source = make_checkpoint(tmp_path / "m", "llama", shard_bytes=10**9)
    tensors = load_file(source / "model.safetensors")
    tensors[key].view(-1)[5] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert _refused("NaN", ExitCode.BAD_FILE, source, tmp_path / "out").what == key


def test_without_the_compiled_part_two_ways_are_named(source_of, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "_loaded", lambda: (None, "this installation was built without CUDA kernels"))
    error = _refused("built without CUDA kernels", ExitCode.NO_DEVICE, source_of("llama"), tmp_path / "out")
    assert "nvcc" in error.next_step
    assert "--format nf4" in error.next_step


# ---- progress


def test_a_layer_that_was_read_is_not_kept(source_of) -> None:
    files = open_model(source_of("llama"))
    with open_checkpoint(files) as checkpoint:
        source = SourceModel(files, checkpoint, ARCHITECTURES["llama"], torch.device("cpu"), seed=0)
        block = source.block(1)
    assert not any(parameter.is_meta for parameter in block.parameters())
    assert all(parameter.is_meta for parameter in source.model.parameters())


def test_memory_that_runs_out_is_an_answer(source_of, tmp_path, monkeypatch) -> None:
    def greedy(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.06 GiB\nmore")

    monkeypatch.setattr(by_layer, "quantize_layer", greedy)
    error = _refused("ran out of memory while quantizing", ExitCode.DOES_NOT_FIT, source_of("llama"), tmp_path / "out")
    assert "--windows" in error.next_step


def test_memory_that_runs_out_before_the_first_layer_is_an_answer(source_of, tmp_path, monkeypatch) -> None:
    def greedy(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.06 GiB\nmore")

    monkeypatch.setattr(by_layer.memory, "check_ram", greedy)
    error = _refused("ran out of memory while quantizing", ExitCode.DOES_NOT_FIT, source_of("llama"), tmp_path / "out")
    assert "--windows" in error.next_step


def test_progress_tells_of_every_group(source_of, tmp_path) -> None:
    told: list[tuple[str, int, int]] = []
    by_layer.convert(
        request(source_of("llama"), tmp_path / "out", tuning=Tuning(steps=2)), lambda *each: told.append(each)
    )
    done = [each[1] for each in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == told[-1][2] == 3 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 192)
    assert len(set(done)) == 1 + 3 * 4
