"""Layers that were made before: the model around them is the one that they were made in; nothing else is taken."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from localq import kernels
from localq.cli import execute
from localq.disk import sha256_of
from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.planner import prepare
from localq.quantize import by_layer, prequantized_layers
from localq.quantize.settings import Tuning
from tests.support.files.real_model import smollm2
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests, model_digests
from tests.support.quantize.vq2_conversions import converted, request

PACK = Path(__file__).parents[1] / "tools/pack_layers.py"
made_here = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")


def pack(monkeypatch, model: Path, source: Path, out: Path, *how: str) -> Path:
    how = how or ("--seed", "3", "--made-by", "a test")
    monkeypatch.setattr(sys, "argv", [str(PACK), str(model), str(source), str(out), *how])
    runpy.run_path(str(PACK), run_name="__main__")
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """A source, and what was made of it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("made")
    source = make_checkpoint(
        folder / "source", "llama", dtype=torch.float32, num_hidden_layers=3, initializer_range=0.1
    )
    return source, converted(source, folder / "model", seed=3)


@pytest.fixture
def packed(made, tmp_path, monkeypatch) -> Path:
    source, model = made
    return pack(monkeypatch, model, source, tmp_path / "layers")


@made_here
def test_the_model_around_them_is_the_one_they_were_made_in(made, packed, tmp_path, capsys):
    source, model = made
    out = tmp_path / "again"
    arguments = ["quantize", str(source), "--format", "vq2", "--out", str(out)]
    assert execute([*arguments, "--layers", str(packed)]) == ExitCode.OK
    assert model_digests(out) == model_digests(model)


@made_here
def test_one_command_makes_the_model_and_packs_its_layers(made, packed, tmp_path, monkeypatch):
    source, _ = made
    text = tmp_path / "text"
    text.write_text("The way of a word through a model is long. " * 200)
    options = ["--windows", "1", "--calibration", str(text), "--device", "cpu"]
    folder = pack(monkeypatch, tmp_path / "model", source, tmp_path / "layers", "--make", *options, "--seed", "7")
    ready = prequantized_layers.open_layers(folder)
    assert (ready.seed, ready.source_sha256) == (7, prequantized_layers.open_layers(packed).source_sha256)
    arguments = ["quantize", str(source), "--format", "vq2", "--out", str(tmp_path / "again")]
    assert execute([*arguments, "--layers", str(folder)]) == ExitCode.OK
    assert model_digests(tmp_path / "again") == model_digests(tmp_path / "model")
    made_by = json.loads((folder / prequantized_layers.RECORD).read_text())["made_by"]
    assert made_by == shlex.join(["localq", *arguments[:4], *options, "--seed", "7", "--out", "MODEL"])
    with pytest.raises(SystemExit) as ended:  # the folder is a model by now, and nothing is packed
        pack(monkeypatch, tmp_path / "model", source, tmp_path / "other", "--make", *options)
    assert ended.value.code == ExitCode.USAGE
    assert not (tmp_path / "other").exists()


@made_here
def test_it_needs_no_search(made, packed, tmp_path, monkeypatch):
    source, model = made
    monkeypatch.setattr(kernels, "host_why_not", lambda: "a test took it away")
    ready = prequantized_layers.open_layers(packed)
    asked = request(source, tmp_path / "again", windows=(), layers=ready, seed=ready.seed)
    assert digests(by_layer.convert(asked)) == digests(model)


@made_here
def test_trained_further_they_are_what_a_conversion_ends_with(made, packed, tmp_path):
    """The same windows, the same steps: the same bytes, whether the layers were made in one go or lay ready."""
    source, model = made
    ready, whole = prequantized_layers.open_layers(packed), Tuning(6, 2, 1e-3, 5e-4, 5e-4)
    again = converted(source, tmp_path / "again", layers=ready, joint_tuning=whole, seed=ready.seed)
    assert digests(again) == digests(converted(source, tmp_path / "model", joint_tuning=whole, seed=3))
    assert digests(again) != digests(model)


@made_here
def test_the_command_that_trains_them(made, packed, tmp_path, capsys):
    source, model = made
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("The way of a word through a model is long. " * 300)
    options = ["--layers", str(packed), "--best", "--calibration", str(text), "--windows", "3", "--device", "cpu"]
    assert execute(["quantize", str(source), "--format", "vq2", "--out", str(out), *options]) == ExitCode.OK
    said = capsys.readouterr().err
    assert "3 windows of 512 tokens, on CPU." in said
    assert "paths a row" not in said
    assert "joint training: " in said
    for file in model.glob("model-*.safetensors"):
        before, after = load_file(file), load_file(out / file.name)
        changed = {name.rpartition(".")[2] for name in before if not torch.equal(before[name], after[name])}
        assert not changed & {"codes", "signs"}
        assert ("scales" in changed) == any(name.endswith("scales") for name in before)


def refused(capsys, code: ExitCode, words: str, *arguments: str) -> None:
    assert execute(["quantize", *arguments]) == code
    said = capsys.readouterr().err
    assert words in " ".join(said.split())
    assert "Traceback" not in said


@made_here
def test_what_they_were_not_made_from_is_refused(made, packed, tmp_path, capsys):
    source, _ = made
    other = shutil.copytree(source, tmp_path / "other")
    file = max(other.glob("*.safetensors"))
    weights = bytearray(file.read_bytes())
    weights[-1] ^= 1
    file.write_bytes(weights)
    arguments = ["--format", "vq2", "--out", str(tmp_path / "out"), "--layers", str(packed)]
    refused(capsys, ExitCode.USAGE, "the layers were not quantized from", str(other), *arguments)
    assert not (tmp_path / "out").exists()


@made_here
def test_damaged_ones_are_refused(made, packed, tmp_path, capsys):
    source, _ = made
    arguments = [str(source), "--format", "vq2", "--out", str(tmp_path / "out"), "--layers", str(packed)]
    whole = (packed / "layers.safetensors").read_bytes()
    (packed / "layers.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(capsys, ExitCode.BAD_FILE, "the SHA-256 hash does not match the recorded one", *arguments)
    record = json.loads((packed / "made.json").read_text())
    (packed / "made.json").write_text(json.dumps({**record, "seed": "3"}))
    refused(capsys, ExitCode.BAD_FILE, "sha256, source_sha256 or seed is missing", *arguments)


@made_here
def test_layers_of_another_shape_are_refused(made, packed, tmp_path):
    source, _ = made
    ready = prequantized_layers.open_layers(packed)
    asked = request(source, tmp_path / "out", windows=(), layers=ready, seed=3, scheme="s4l16+s8l16")
    with pytest.raises(LocalqError, match="is missing") as caught:
        by_layer.convert(asked)
    assert caught.value.exit_code == ExitCode.BAD_FILE


@made_here
@pytest.mark.parametrize("what", ["wide", "none"])
def test_tensors_of_another_shape_and_other_files_are_refused(made, packed, tmp_path, what):
    source, _ = made
    path = packed / prequantized_layers.TENSORS
    tensors = {name: each.repeat(2) if each.dim() == 1 else each for name, each in load_file(path).items()}
    path.write_bytes(save(tensors) if what == "wide" else b"no tensors at all")
    record = json.loads((packed / prequantized_layers.RECORD).read_text())
    (packed / prequantized_layers.RECORD).write_text(json.dumps({**record, "sha256": sha256_of(path)}))
    asked = request(source, tmp_path / "out", windows=(), layers=prequantized_layers.open_layers(packed), seed=3)
    with pytest.raises(LocalqError) as caught:
        by_layer.convert(asked)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert caught.value.next_step == prequantized_layers.AGAIN


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--format", "nf4"], "--layers: --format nf4 needs no calibration"),
        (["--format", "aqlm2x8"], "the format is fixed by the existing layers"),
        (["--format", "vq2", "--bits", "3"], "--bits is fixed by the existing layers"),
        (["--format", "vq2", "--quick"], "--quick is fixed by the existing layers"),
        (["--format", "vq2", "--best", "--seed", "1"], "--seed is fixed by the existing layers"),
        (["--format", "vq2", "--best"], "the folder contains no quantized layers"),
        (["--format", "vq2", "--device", "cpu"], "--device is fixed by the existing layers"),
        (["--format", "vq2"], "the folder contains no quantized layers"),
    ],
)
def test_options_that_do_not_go_with_it(tmp_path, capsys, changes, words):
    (tmp_path / "source").mkdir()
    arguments = [str(tmp_path / "source"), "--out", str(tmp_path / "out"), "--layers", str(tmp_path), *changes]
    assert execute(["quantize", *arguments]) in (ExitCode.USAGE, ExitCode.BAD_FILE)
    assert words in " ".join(capsys.readouterr().err.split())


def test_those_that_come_with_localq_are_what_their_record_says():
    target = catalog.resolve("smollm2-135m@vq2")
    folder = prepare.ready_layers(target)
    assert folder is not None
    ready = prequantized_layers.open_layers(folder)
    assert sha256_of(folder / prequantized_layers.TENSORS) == ready.sha256
    assert sha256_of(smollm2()) == ready.source_sha256
    assert prepare.ready_layers(catalog.resolve("smollm2-135m@nf4")) is None
