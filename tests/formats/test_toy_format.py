"""A format is a record of facts and a module: with these two alone it is quantized, loaded, run, and offered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from localq import formats
from localq.bench.models import format_list
from localq.bench.synthetic import checkpoint as synthetic_checkpoint
from localq.cli import execute
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.files import format_facts
from localq.files.format_facts import Format
from localq.files.model_folder import open_model
from localq.formats.linear import SlabLinear
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import ids_of
from tests.support.models.tiny_checkpoints import make_checkpoint

NAME, SUFFIXES = "toy8", (".toy", ".toy_scale")
RECORD = Format(
    NAME, lambda linear, scheme: linear.columns + 4, "toy_int8", made_from="tensors", made_by_name=True
)  # bytes of a row: codes, and a scale


@dataclass(frozen=True)
class Packed:
    """Codes i8 [out, in], scales f32 [out]: weight = code * scale of its row."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self):
        return tuple(self.codes.shape)


class Linear(SlabLinear):
    format = NAME

    def __init__(self, packed, bias=None):
        super().__init__(packed.shape, bias)
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scales", packed.scales)

    def operand(self):
        return None  # no kernel

    def unpack(self, first, out):
        raise ValueError("no kernel")

    def dequantized_rows(self, first, count, dtype, out):
        rows = slice(first, first + count)
        return dequantize(Packed(self.codes[rows], self.scales[rows]), dtype)

    def forward(self, x):
        return F.linear(x, self.dequantized_rows(0, self.out_features, x.dtype, None), self.bias)


def quantize(weight):
    scales = weight.float().abs().amax(1) / 127
    return Packed((weight.float() / scales[:, None]).round().to(torch.int8), scales)


def dequantize(packed, dtype):
    return (packed.codes.float() * packed.scales[:, None]).to(dtype)


def layout(out, columns, scheme=""):
    return {SUFFIXES[0]: (torch.int8, (out, columns)), SUFFIXES[1]: (torch.float32, (out,))}


def sizes(tensors, prefix):
    return [tensors[prefix + suffix].nbytes for suffix in SUFFIXES]


def toy() -> ModuleType:
    """The module of the format."""
    module = ModuleType(NAME)
    module.__dict__.update(
        BLOCK=1, VARIANTS=("",), Packed=Packed, Linear=Linear, quantize=quantize, dequantize=dequantize, layout=layout,
        quant_method=RECORD.quant_method, suffixes=SUFFIXES, bytes=lambda out, columns: out * (columns + 4),
        sample=lambda shape, seed, device="cpu", scheme="": quantize(torch.randn(shape) * shape[1] ** -0.5),
        is_quantized=lambda tensors, prefix: prefix + SUFFIXES[0] in tensors,
        placed_bytes=sizes, stored_bytes=lambda tensors, prefix: sum(sizes(tensors, prefix)),
        stored_shape=lambda checkpoint, prefix: tuple(checkpoint.tensors[prefix + SUFFIXES[0]].shape),
        from_checkpoint=lambda checkpoint, prefix: Packed(*(checkpoint.read(prefix + each) for each in SUFFIXES)),
        to_tensors=lambda packed, prefix: {prefix + SUFFIXES[0]: packed.codes, prefix + SUFFIXES[1]: packed.scales},
        stored=lambda packed: dict(zip(SUFFIXES, (packed.codes, packed.scales), strict=True)),
        quantization_config=lambda dtype, skipped, *given: {"quant_method": RECORD.quant_method},
    )  # fmt: skip
    return module


@pytest.fixture
def added(monkeypatch):
    """The format, added at the two places."""
    monkeypatch.setitem(format_facts.FORMATS, NAME, RECORD)
    monkeypatch.setitem(formats.FORMATS, NAME, toy())


@pytest.fixture
def source(tmp_path):
    return make_checkpoint(tmp_path / "source", "qwen3", num_hidden_layers=2)


def test_it_is_quantized_loaded_and_run(added, source, tmp_path):
    assert execute(["quantize", str(source), "--format", NAME, "--out", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == RECORD.quant_method
    found, plain = (
        load(open_model(each), LoadOptions(device="cpu", dtype="float32")) for each in (tmp_path / "out", source)
    )
    assert (found.format, plain.format != NAME) == (NAME, True)
    weights = zip(found.model.parameters(), plain.model.parameters(), strict=True)
    assert all((mine.float() - theirs.float()).abs().max() <= theirs.abs().max() / 100 for mine, theirs in weights)
    assert len(ids_of(Engine(found), [5, 6, 7], max_tokens=4)) == 4


def test_it_is_offered_for_a_card(added, capsys):
    assert execute(["fit", "--vram", "24", "--format", NAME]) == 0
    assert f"@{NAME}" in capsys.readouterr().out


def test_it_is_a_row_of_the_formats_of_a_model(added, source):
    assert NAME in format_list.names()
    found = format_list.find(str(source), print, None, True)
    (candidate,) = (each for each in found.candidates if each.format == NAME)
    assert f"--format {NAME}" in candidate.command


def test_it_is_evaluated(added, source, tmp_path, capsys):
    out = tmp_path / "out"
    execute(["quantize", str(source), "--format", NAME, "--out", str(out)])
    text = tmp_path / "text.txt"
    text.write_text("All formats are equal. " * 40)
    capsys.readouterr()
    assert execute(["eval", str(source), str(out), "--text", str(text), "--device", "cpu", "--window", "64"]) == 0
    assert NAME in capsys.readouterr().out


def test_random_weights_are_made_in_it(added):
    files, format = synthetic_checkpoint.files_of(f"smollm2-135m@{NAME}")
    weights = synthetic_checkpoint.checkpoint(files, format, torch.device("cpu"), seed=0)
    prefix = "model.layers.0.mlp.down_proj"
    gain = dequantize(formats.FORMATS[NAME].from_checkpoint(weights, prefix), torch.float32).square().sum(1).sqrt()
    assert gain.mean() == pytest.approx(1.0, rel=0.05)


def test_without_its_record_it_is_unknown(source, tmp_path, capsys):
    assert execute(["quantize", str(source), "--format", NAME, "--out", str(tmp_path / "out")]) == 2
    assert NAME in capsys.readouterr().err
