"""The verbs on a folder in vq2: what they call it, what they count, and that it runs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from localq.cli import execute
from localq.errors import ExitCode
from localq.files import catalog, format_facts
from localq.formats.codebooks import vq2
from localq.planner import footprint
from localq.planner import plan as memory_plan
from tests.support.formats.vq2_checkpoints import write

TEXT = str(Path(__file__).parents[3] / "LICENSE")
# the linears of a block of `tiny_checkpoints.TINY`
SHAPES = [(128, 128), (64, 128), (64, 128), (128, 128), (192, 128), (192, 128), (128, 192)]
COUNT = sum(out * columns for out, columns in SHAPES)
MOST = sum(vq2.bytes(*shape, "s4l16+s8l16") for shape in SHAPES)
BOOKS = 2 * 2 * 256 * 16  # bytes of the two codebooks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Two layers; one codebook of each kind for the model."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny") / "vq2"
    write(path, "s4l16+s8l16", home=lambda path: "model", num_hidden_layers=2)
    return str(path)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))


def json_of(capsys, *arguments: str) -> dict:
    assert execute([*arguments, "--json"]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)


def test_show_names_format_and_scheme(folder, capsys):
    body = json_of(capsys, "show", folder)
    assert (body["format"], body["scheme"], body["runs"]) == ("vq2", "s4l16+s8l16", True)
    assert execute(["show", folder]) == ExitCode.OK
    assert "vq2 s4l16+s8l16" in capsys.readouterr().out


def test_fit_counts_no_less_than_the_files_take(folder, capsys):
    (row,) = json_of(capsys, "fit", folder, "--vram", "8")["rows"]
    assert (row["format"], row["fits"], row["runs"], row["ctx_max"]) == ("vq2", True, True, 512)
    assert row["bits_per_weight"] == round(8 * MOST / COUNT, 3)
    tensors = [each for path in Path(folder).glob("*.safetensors") for each in load_file(path).items()]
    stored = sum(tensor.nbytes for name, tensor in tensors if "embed_tokens" not in name and "lm_head" not in name)
    assert row["ledger_bytes"]["weights"] == stored
    assert stored <= 2 * MOST + 2 * (2 * 2 + 1) * 128  # what is planned before there are files


def test_eval_counts_the_bits_of_the_files(folder, capsys):
    few = ("--text", TEXT, "--window", "64", "--max-windows", "1", "--device", "cpu", "--against", "reference")
    body = json_of(capsys, "eval", folder, *few)
    assert body["format"] == "vq2"
    assert body["bits_per_weight"] == 8 * (2 * (MOST - len(SHAPES) * BOOKS) + BOOKS) / (2 * COUNT)
    assert (body["kl"], body["top1"]) == (0.0, 1.0)  # a CPU computes with the definition


def test_run_replies(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert execute(["run", folder, "hello", "--device", "cpu", "-n", "5", "--temp", "0"]) == ExitCode.OK
    assert "5 tokens" in capsys.readouterr().err


def test_what_is_in_it_is_not_quantized_again(folder, tmp_path, capsys):
    assert execute(["quantize", folder, "--out", str(tmp_path / "out")]) == ExitCode.USAGE
    assert "already quantized (localq_vq2)" in capsys.readouterr().err


def test_a_70b_is_planned_with_what_it_takes():
    arch = catalog.find("llama-3.3-70b").arch
    assert footprint.bits_per_weight(arch, "vq2", "s4l16") == pytest.approx(2.004, abs=2e-3)
    alone = memory_plan.assess(arch, "vq2", 24_564 * 2**20, scheme="s4l16")
    assert alone.fits
    wide = memory_plan.assess(arch, "vq2", None, scheme="s4l16").ledger.components
    plain = memory_plan.assess(arch, "aqlm", None, scheme="2x8g8").ledger.components
    assert wide["weights"] > plain["weights"]  # the signs
    unpacked = format_facts.FORMATS["aqlm"].unpack_bytes  # by torch, where vq2 is read by kernels
    assert wide["scratch"] - plain["scratch"] == 2 * 1024 * arch.intermediate - unpacked  # x rotated
    assert wide["tables"] > plain["tables"]
