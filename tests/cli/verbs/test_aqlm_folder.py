"""The verbs on a folder in AQLM: what they call it, what they count, and that it runs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from localq.cli import execute
from localq.errors import ExitCode
from tests.support.formats.aqlm_checkpoints import LAYOUTS, write

TEXT = str(Path(__file__).parents[3] / "LICENSE")
# the linears of a block of `tiny_checkpoints.TINY`: 2x8 takes a quarter byte a weight, its codebooks and scales besides
SHAPES = [(128, 128), (64, 128), (64, 128), (128, 128), (192, 128), (192, 128), (128, 192)]
STORED = sum(out * columns // 4 + 2 * 2 * 256 * 8 + 2 * out for out, columns in SHAPES)
BITS = 8 * STORED / sum(out * columns for out, columns in SHAPES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    torch.set_num_threads(1)
    return str(write(tmp_path_factory.mktemp("tiny") / "aqlm", LAYOUTS["2x8g8"], num_hidden_layers=2))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))


def json_of(capsys, *arguments: str) -> dict:
    assert execute([*arguments, "--json"]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)


def test_show_names_format_and_scheme(folder, capsys):
    body = json_of(capsys, "show", folder)
    assert (body["format"], body["scheme"], body["runs"]) == ("aqlm", "2x8g8", True)
    assert json_of(capsys, "show", "llama-3.1-70b@aqlm")["scheme"] == "1x16g8"
    assert json_of(capsys, "show", "llama-3.1-8b")["scheme"] is None
    assert execute(["show", folder]) == ExitCode.OK
    assert "aqlm 2x8g8" in capsys.readouterr().out


def test_fit_counts_the_bits_of_the_files(folder, capsys):
    (row,) = json_of(capsys, "fit", folder, "--vram", "8")["rows"]
    assert (row["format"], row["fits"], row["runs"], row["ctx_max"]) == ("aqlm", True, True, 512)
    assert row["bits_per_weight"] == round(BITS, 3)
    assert row["ledger_bytes"]["weights"] == 2 * STORED + 2 * (2 * 2 + 1) * 128


def test_eval_counts_the_same_bits(folder, capsys):
    few = ("--text", TEXT, "--window", "64", "--max-windows", "1", "--device", "cpu", "--against", "reference")
    body = json_of(capsys, "eval", folder, *few)
    assert body["format"] == "aqlm"
    assert body["bits_per_weight"] == BITS
    assert (body["kl"], body["top1"]) == (0.0, 1.0)  # a CPU computes with the definition


def test_run_replies(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert execute(["run", folder, "hello", "--device", "cpu", "-n", "5", "--temp", "0"]) == ExitCode.OK
    assert "5 tokens" in capsys.readouterr().err


def test_what_cannot_be_quantized_is_refused(folder, tmp_path, capsys):
    assert execute(["quantize", folder, "--out", str(tmp_path / "out")]) == ExitCode.USAGE
    assert "already quantized (aqlm)" in capsys.readouterr().err
    assert execute(["quantize", folder, "--format", "aqlm", "--out", str(tmp_path / "out")]) == ExitCode.USAGE
    assert (
        "localq cannot write this format. Formats: nf4, vq2, aqlm2x8, mxfp4, bcq, squeezellm."
        in capsys.readouterr().err
    )
