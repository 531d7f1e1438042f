"""`localq quantize --format vq2`: its options and text, the verbs on what it makes, and NAME@vq2."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from localq import driver, gpus, kernels, places
from localq.bench.quality.bits import per_weight
from localq.cli import execute
from localq.cli.verbs import quantize_calibrated
from localq.driver import Driver
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, schemes
from localq.files.hub import fetch as hub
from localq.files.model_folder import open_model
from localq.files.publish import made_model
from localq.planner import making, prepare
from localq.quantize import by_layer, calibration
from localq.quantize.codebooks.initial_codebooks import SCHEMES
from localq.quantize.request import LayerwiseRequest
from localq.quantize.settings import Effort, Tuning
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.vq2_conversions import converted

needs_search = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")
LICENSE = Path(__file__).parents[3] / "LICENSE"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return str(make_checkpoint(folder, "llama", num_hidden_layers=2, max_position_embeddings=256))


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = execute([*map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- from the shell to a conversation


@needs_search
def test_a_model_is_made_and_every_verb_takes_it(source, tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "out"
    few = ("--format", "vq2", "--calibration", LICENSE, "--windows", 3, "--device", "cpu")
    code, printed, said = run(capsys, "quantize", source, "--out", out, *few)
    assert (code, printed) == (0, "")
    assert "3 windows of 256 tokens" in said
    assert "run the same command to resume" in said
    assert "\x1b" not in said
    record = json.loads((out / "localq.json").read_text())
    assert record["calibration"] == "3 windows of 256 tokens from LICENSE"
    assert record["command"].endswith(" --format vq2 --calibration LICENSE --windows 3")
    assert str(tmp_path) not in str(record)
    assert made_model.open_made(out).bits == pytest.approx(per_weight(open_model(out)))
    shown = json.loads(run(capsys, "show", out, "--json")[1])
    assert (shown["format"], shown["scheme"], shown["runs"]) == ("vq2", "s4l16", True)
    (row,) = json.loads(run(capsys, "fit", out, "--vram", "8", "--json")[1])["rows"]
    assert (row["format"], row["fits"]) == ("vq2", True)
    text = ("--text", LICENSE, "--window", 64, "--max-windows", 2, "--device", "cpu")
    judged = json.loads(run(capsys, "eval", out, *text, "--against", source, "--json")[1])
    assert judged["format"] == "vq2"
    assert 0 < judged["kl"] < 1
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(capsys, "run", out, "hello", "--device", "cpu", "-n", "5")[0] == 0

    code, _, said = run(capsys, "quantize", source, "--out", out, *few)
    assert code == ExitCode.USAGE
    assert "--force" in said
    assert "goes on" not in said
    code, printed, said = run(capsys, "quantize", source, "--out", out, *few, "--force", "--json", "--quiet")
    assert (code, said) == (0, "")
    weights = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert json.loads(printed) == {"schema": 1, "path": str(out), "format": "vq2", "weights_bytes": weights}
    code, _, said = run(capsys, "quantize", out, "--out", tmp_path / "again", *few)
    assert code == ExitCode.USAGE
    assert "already quantized (vq2)" in said


# ---- options


def asked(monkeypatch, capsys, source: str, *arguments: object) -> LayerwiseRequest:
    """What the options ask of the encoder."""
    found: list[LayerwiseRequest] = []

    def convert(request: LayerwiseRequest, on_progress: Any, say: Any) -> Path:
        found.append(request)
        return request.out

    monkeypatch.setattr(by_layer, "convert", convert)
    monkeypatch.setattr(prepare, "check_can_make", lambda *asked: None)
    common = ("--out", "out", "--device", "cpu", "--calibration", LICENSE)
    assert run(capsys, "quantize", source, *common, *arguments)[0] == 0
    return found[0]


def test_the_record_names_options_and_texts_without_paths(source, monkeypatch, capsys, tmp_path) -> None:
    text = tmp_path / "my own.txt"
    text.write_text("Words of the user. " * 2000)
    made = asked(monkeypatch, capsys, source, "--format", "vq2", "--best", "--seed", "7", "--calibration", str(text))
    assert made.record is not None
    name = Path(source).name
    assert made.record.source == name
    command = f'localq quantize {name} --format vq2 --calibration LICENSE --calibration "my own.txt" --best --seed 7'
    assert made.record.command == command
    assert made.record.calibration.endswith("tokens from LICENSE, my own.txt")


def test_options_reach_the_encoder(source, monkeypatch, capsys) -> None:
    quick = asked(monkeypatch, capsys, source, "--format", "vq2")
    assert (quick.format, quick.scheme, quick.seed, quick.force) == ("vq2", "s4l16", 0, False)
    assert (quick.effort, quick.tuning, quick.joint_tuning) == (Effort(), Tuning(), Tuning())
    assert quick == asked(monkeypatch, capsys, source, "--format", "vq2", "--quick", "--bits", "2", "--seed", "0")
    best = asked(monkeypatch, capsys, source, "--format", "vq2", "--best", "--seed", "9", "--force")
    assert best.effort.beam > quick.effort.beam
    assert best.effort.rounds > quick.effort.rounds
    assert best.tuning.steps > quick.tuning.steps == 0
    read = quantize_calibrated.WHOLE_PASSES * len(best.windows)  # by training all layers
    assert best.joint_tuning.steps * best.joint_tuning.sequences - read in range(best.joint_tuning.sequences)
    assert (best.seed, best.force) == (9, True)
    aqlm = asked(monkeypatch, capsys, source, "--format", "aqlm2x8", "--windows", "2")
    assert (aqlm.format, len(aqlm.windows)) == ("aqlm2x8", 2)
    for bits, scheme in schemes.VQ2_SCHEMES.items():
        assert asked(monkeypatch, capsys, source, "--format", "vq2", "--bits", bits).scheme == scheme
        assert scheme in SCHEMES
    for written, bits in {"2.0": "2", "2.50": "2.5", "3.00": "3"}.items():
        again = asked(monkeypatch, capsys, source, "--format", "vq2", "--bits", written)
        assert (again.scheme, again.bits) == (schemes.VQ2_SCHEMES[bits], None)
    mixed = asked(monkeypatch, capsys, source, "--format", "vq2", "--bits", "2.30")
    assert (mixed.bits, mixed.scheme, quick.bits) == (2.3, "s4l16", None)
    limited = asked(monkeypatch, capsys, source, "--format", "vq2", "--vram", "12GiB")
    assert (limited.vram_bytes, quick.vram_bytes) == (12 * 2**30, None)


def test_only_the_best_reads_all_of_a_long_text(source, monkeypatch, capsys) -> None:
    monkeypatch.setattr(quantize_calibrated, "QUICK_WINDOWS", 2)
    assert len(asked(monkeypatch, capsys, source, "--format", "vq2").windows) == 2
    assert len(asked(monkeypatch, capsys, source, "--format", "vq2", "--best").windows) > 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--bits", "2"), "--bits: --format nf4"),
        (("--bits", "3"), "Formats with this option: vq2, bcq."),
        (("--windows", "2"), "Formats with this option: vq2, aqlm2x8, bcq, squeezellm."),
        (("--seed", "1"), "Formats with this option: vq2, aqlm2x8."),
        (("--format", "aqlm2x8", "--bits", "4"), "Use --bits only with --format vq2 or bcq."),
        (("--calibration", LICENSE), "--calibration: --format nf4"),
        (("--windows", "3"), "--windows: --format nf4"),
        (("--quick",), "--quick: --format nf4"),
        (("--best",), "--best: --format nf4"),
        (("--device", "cpu"), "--device: --format nf4"),
        (("--seed", "0"), "--seed: --format nf4"),
        (("--vram", "24"), "--vram: --format nf4"),
        (("--format", "aqlm2x8", "--bits", "2"), "--bits: --format aqlm2x8"),
        (("--format", "vq2", "--best", "--quick"), "--best: cannot be combined with --quick"),
        (("--format", "vq2", "--quick", "--best"), "--best: cannot be combined with --quick"),
        (("--format", "vq2", "--bits", "5"), "'5' is not supported. Use 2, 2.5, 3, 4"),
        (("--format", "vq2", "--bits", "1.9"), "'1.9' is not supported"),
        (("--format", "vq2", "--bits", "4.5"), "'4.5' is not supported"),
        (("--format", "vq2", "--bits", "2.333"), "a mixture in between"),
        (("--format", "vq2", "--bits", "2.001"), "'2.001' is not supported"),
        (("--format", "vq2", "--bits", "1.00"), "'1.00' is not supported"),
        (("--format", "vq2", "--calibration", "none"), "none: --format vq2 needs a calibration text"),
        (("--format", "vq3"), "Formats: nf4, vq2, aqlm2x8, mxfp4, bcq, squeezellm"),
        (("--format", "vq2", "--windows", "0"), "--windows"),
        (("--format", "vq2", "--seed", "-1"), "--seed"),
        (("--format", "vq2", "--device", "tpu"), "'tpu' is not a valid value"),
        (("--format", "vq2", "--calibration", "no-such-file"), "no-such-file cannot be read"),
        (("--format", "vq2", "--calibration", LICENSE, "--windows", "9999"), "--windows: the text has"),
    ],
    ids=lambda each: " ".join(str(part) for part in each).replace(str(LICENSE), "FILE") if type(each) is tuple else "",
)
def test_what_does_not_apply_is_refused(source, tmp_path, capsys, monkeypatch, arguments, named) -> None:
    monkeypatch.setattr(prepare, "check_can_make", lambda *asked: None)
    code, _, said = run(capsys, "quantize", source, "--out", tmp_path / "out", *arguments)
    assert code == ExitCode.USAGE
    assert named in said
    assert not (tmp_path / "out").exists()


def test_an_installation_without_the_compiled_part_names_two_ways_out(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub, "fetch", lambda *_, **__: pytest.fail("nothing is fetched for what cannot be made"))
    for name in ("llama-3.1-8b", "org/repo"):
        code, _, said = run(capsys, "quantize", name, "--format", "vq2", "--out", tmp_path / "out")
        assert code == ExitCode.NO_DEVICE
        assert "nvcc" in said
        assert "--format nf4" in said
    with pytest.raises(LocalqError) as caught:
        prepare.source_path("smollm3-3b@vq2", pytest.fail)
    assert caught.value.exit_code == ExitCode.NO_DEVICE


# ---- the text


def test_windows_come_from_all_over_the_text(source) -> None:
    files, text = open_model(Path(source)), LICENSE.read_text()
    every = calibration.token_windows(files, text, None)
    assert {len(window) for window in every} == {256}
    assert calibration.token_windows(files, text, None, most=3) == [
        every[index * len(every) // 3] for index in range(3)
    ]
    assert calibration.token_windows(files, text, len(every)) == every
    assert calibration.token_windows(files, text, None, most=10**6) == every


def test_long_texts_are_tokenized_piece_by_piece(source, monkeypatch) -> None:
    files, text = open_model(Path(source)), LICENSE.read_text() * 3
    whole = calibration.token_windows(files, text, None)
    monkeypatch.setattr(calibration, "PIECE", 500)
    assert calibration.token_windows(files, text, None) == whole  # rows end where tokens do


def test_texts_that_do_not_do(source, tmp_path) -> None:
    files = open_model(Path(source))
    with pytest.raises(LocalqError, match="tokens, fewer than one 256-token window") as caught:
        calibration.token_windows(files, "too short", None)
    assert caught.value.exit_code == ExitCode.USAGE
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "long").write_bytes(b"a" * (calibration.MAX_TEXT_BYTES + 1))
    for path, why in (
        ("latin", "not UTF-8"),
        ("long", "too large"),
        (".", "cannot be read"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(LocalqError, match=why) as caught:
            calibration.read_text(tmp_path / path)
        assert caught.value.exit_code == ExitCode.USAGE


def test_the_default_text_is_the_one_that_is_described() -> None:
    described = (calibration.DEFAULT_TEXT.parent / "README.md").read_text()
    (line,) = [each for each in described.splitlines() if f"`{calibration.DEFAULT_TEXT.name}`" in each]
    raw = calibration.DEFAULT_TEXT.read_bytes()
    assert f"`{hashlib.sha256(raw).hexdigest()}`" in line
    assert f"{len(raw):,}" in line
    assert calibration.read_text(calibration.DEFAULT_TEXT).encode() == raw


# ---- NAME@vq2


def test_a_name_at_vq2_is_made_here_once_announced(tmp_path, monkeypatch) -> None:
    said: list[str] = []
    commands: list[list[str]] = []
    monkeypatch.setattr(prepare, "check_can_make", lambda *asked: None)
    monkeypatch.setattr(hub, "fetch", lambda *_, **__: tmp_path / "source")
    monkeypatch.setattr(driver, "probe_driver", lambda: Driver(present=False))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(prepare.subprocess, "run", run)
    path = prepare.source_path("smollm3-3b@vq2", said.append)
    assert path == places.quantized_dir() / "smollm3-3b@vq2"
    assert commands[0][-5:] == [str(tmp_path / "source"), "--format", "vq2", "--out", str(path)]
    assert re.search(r"localq quantizes \S+ once \(about \d+ (min|h) after the download\)", said[0])


def test_estimates_know_the_machine(monkeypatch) -> None:
    monkeypatch.setattr(making.os, "sched_getaffinity", lambda process: range(2))
    monkeypatch.setattr(driver, "probe_driver", lambda: Driver(present=False))
    assert making.estimate("nf4", 134_515_008) == "about 1 min"
    assert making.estimate("vq2", 134_515_008) == "about 37 min"
    assert making.estimate("vq2", 8_000_000_000) == "about 37 h"
    monkeypatch.setattr(driver, "probe_driver", lambda: Driver(present=True, why_not="it finds no GPU"))
    assert making.estimate("vq2", 8_000_000_000) == "about 37 h"
    monkeypatch.setattr(driver, "probe_driver", lambda: Driver(present=True))
    assert making.estimate("vq2", 8_000_000_000) == "about 7 min"
    assert making.estimate("vq2", 134_515_008) == "about 1 min"
    assert making.estimate("vq2", 70_553_706_496) == "about 63 min"  # 62 by its layers: `bench --quantize`, 8272b55
    card = gpus.Gpu(**{**dict.fromkeys(each.name for each in fields(gpus.Gpu)), "name": "NVIDIA GeForce RTX 3090"})
    monkeypatch.setattr(gpus, "first_visible", lambda found: card)
    assert making.estimate("vq2", 70_553_706_496) == "about 108 min"  # 82 multiprocessors at 1.7 GHz


@needs_search
def test_what_was_made_is_listed_found_and_removed(source, tmp_path, capsys) -> None:
    shutil.copytree(converted(Path(source), tmp_path / "out"), places.quantized_dir() / "smollm3-3b@vq2")
    (model,) = json.loads(run(capsys, "ls", "--json")[1])["models"]
    assert (model["name"], model["format"], model["complete"]) == ("smollm3-3b@vq2", "vq2", True)
    assert hub.local_path(catalog.resolve("smollm3-3b@vq2")) == places.quantized_dir() / "smollm3-3b@vq2"
    assert run(capsys, "rm", "smollm3-3b@vq2", "-y")[0] == 0
    assert json.loads(run(capsys, "ls", "--json")[1])["models"] == []
