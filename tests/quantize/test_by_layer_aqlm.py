"""Models as AQLM 2x8: transformers with the package computes what localq does; a kill changes nothing; refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq import kernels
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.files.stored_format import scheme_of
from localq.formats.codebooks import aqlm
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize import by_layer
from localq.quantize.by_layer import convert
from localq.quantize.model.calibration_stream import check_range
from localq.quantize.request import LayerwiseRequest
from localq.quantize.settings import Effort, Tuning
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats import aqlm_package
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

CPU = torch.device("cpu")
F32 = LoadOptions(device="cpu", dtype="float32")
UP, Q = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"


def request(source: Path, out: Path, **options: Any) -> LayerwiseRequest:
    windows = [prompt_of(48, seed) for seed in range(16)]
    options = {
        "format": "aqlm2x8",
        "effort": Effort(beam=6, columns=64),
        "tuning": Tuning(steps=4, sequences=2),
        **options,
    }
    return LayerwiseRequest(open_model(source), out, windows, CPU, **options)


def made(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    source = make_checkpoint(folder / "source", model_type, num_hidden_layers=2, **overrides)
    return convert(request(source, folder / "out"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """Its embedding is its head, in the source."""
    return made(tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},  # biases
    "qwen3": {},
    "phi3": {},  # q, k, v and gate, up behind each other
    "gemma2": {"tie_word_embeddings": True},  # norms on either side: the stream is not turned
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_with_the_package(tmp_path, family):
    """In float32, of matrices that both round to the float16 of the files as AQLM says."""
    out = made(tmp_path, family, **FAMILIES[family])
    files, ids = open_model(out), prompt_of(33, seed=50)
    loaded = load(files, F32)
    assert (loaded.format, scheme_of(files)) == ("aqlm", "2x8g8")
    got = logits_of(loaded.model, loaded, ids)
    expected = aqlm_package.logits(out, ids, quantized=8 if family == "phi3" else 14, kept=torch.float16)
    assert distance(got, expected) < 3e-5  # f32 sums in another order
    source = load(open_model(tmp_path / "source"), F32)
    assert distance(got, logits_of(source.model, source, ids)) < 0.7  # 1.4 where a rotation is not taken back


def test_transformers_runs_it_in_the_type_of_the_files(llama):
    """As it is loaded by those who take the defaults."""
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(llama).dtype == torch.float16
    ids = prompt_of(33, seed=50)
    exact = aqlm_package.logits(llama, ids, quantized=14, kept=torch.float16)
    assert distance(aqlm_package.logits(llama, ids, quantized=14, dtype=torch.float16).float(), exact) < 2**-11 * 16


def test_files_are_as_aqlm_has_them(llama):
    with open_checkpoint(open_model(llama)) as checkpoint:
        tensors = dict(checkpoint.tensors)
        up, q, k = (aqlm.from_checkpoint(checkpoint, name) for name in (UP, Q, Q.replace("q_", "k_")))
    assert {name.rpartition(".")[2] for name in tensors} == {"codes", "codebooks", "scales", "weight"}
    assert {info.dtype for name, info in tensors.items() if not name.endswith(".codes")} == {"float16"}
    assert (up.codes.dtype, tuple(up.codes.shape)) == (torch.int8, (192, 16, 2))
    assert tuple(up.codebooks.shape) == (2, 256, 1, 8)
    assert tuple(up.scales.shape) == (192, 1, 1, 1)
    assert not torch.equal(q.codebooks, k.codebooks)
    config = json.loads((llama / "config.json").read_text())
    stated = config["quantization_config"]
    unquantized = stated.pop("linear_weights_not_to_quantize")
    assert stated == {
        "quant_method": "aqlm",
        "in_group_size": 8,
        "out_group_size": 1,
        "num_codebooks": 2,
        "nbits_per_codebook": 8,
    }
    assert {"lm_head", "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= set(unquantized)
    assert config["dtype"] == "float16"
    assert config["tie_word_embeddings"] is False
    assert not torch.equal(*(load_weights(llama)[name] for name in ("lm_head.weight", "model.embed_tokens.weight")))


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def test_streams_that_cannot_be_turned_keep_their_head(tmp_path):
    out = made(tmp_path, "gemma2", tie_word_embeddings=True)
    source, written = load_weights(tmp_path / "source"), load_weights(out)
    assert "lm_head.weight" not in written
    name = "model.embed_tokens.weight"
    assert torch.equal(written[name], source[name].half())
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_kill_changes_nothing(tmp_path, llama, shard, monkeypatch):
    """At the writing of a shard; then the same call again."""
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=2, tie_word_embeddings=True)
    write, written = by_layer.ShardWriter.write, []

    def killed(self, planned, tensors):
        if len(written) == shard:
            raise KeyboardInterrupt
        written.append(planned.name)
        write(self, planned, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(by_layer.ShardWriter, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(request(source, tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == shard
    assert digests(convert(request(source, tmp_path / "out"))) == digests(llama)


def test_the_other_format_is_another_conversion(tmp_path):
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=2)
    one = request(source, tmp_path / "out")
    convert(one)
    with pytest.raises(LocalqError, match="not empty"):
        convert(dataclasses.replace(one, format="vq2"))


def scaled(folder: Path, model_type: str, name: str, factor: float) -> Path:
    """A source, one of whose tensors is multiplied."""
    source = make_checkpoint(folder / "source", model_type, num_hidden_layers=2, shard_bytes=10**9)
    tensors = load_file(source / "model.safetensors")
    tensors[name] *= factor
    save_file(tensors, source / "model.safetensors")
    return source


def test_weights_beyond_float16_are_named(tmp_path):
    source = scaled(tmp_path, "llama", "model.embed_tokens.weight", 1e7)
    with pytest.raises(LocalqError, match=r"embed_tokens.weight.*outside the range of float16") as caught:
        convert(request(source, tmp_path / "out"))
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_what_float16_cannot_compute_is_refused(tmp_path):
    """gemma multiplies its embedding, whose weights float16 can hold."""
    source = scaled(tmp_path, "gemma2", "model.embed_tokens.weight", 3e5)
    with pytest.raises(LocalqError, match=r"layer 0 produces values.*outside the range of float16.*vq2") as caught:
        convert(request(source, tmp_path / "out"))
    assert caught.value.exit_code == ExitCode.USAGE


def test_what_is_no_number_is_no_matter_of_the_format():
    with pytest.raises(LocalqError, match="layer 3 produces NaN") as caught:
        check_range([torch.tensor([1.0, torch.nan])], 3, "org/repo", torch.float16)
    assert caught.value.exit_code == ExitCode.BAD_FILE
