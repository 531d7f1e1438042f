"""Models of mixed bits: the size is kept, it reaches more than one scheme everywhere, and a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from localq import cli, kernels
from localq.bench.quality import bits
from localq.errors import ExitCode, LocalqError
from localq.files.architecture import Architecture
from localq.files.model_folder import open_model
from localq.files.stored_format import scheme_of
from localq.planner import footprint
from localq.quantize import by_layer
from localq.quantize.bits import mixture as bit_mixture
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests
from tests.support.quantize.vq2_conversions import converted, loaded, logits, request, windows

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

# Codebooks of 8 KB weigh little enough for a mixture.
SHAPE = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
HALF = "s4l16+s16l16"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("source") / "m"
    return make_checkpoint(folder, "llama", dtype=torch.float32, initializer_range=0.08, **SHAPE)


@pytest.fixture(scope="module")
def uniform(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("out") / "uniform", scheme=HALF)


@pytest.fixture(scope="module")
def wanted(uniform: Path) -> float:
    """The bits of one scheme everywhere, as a user would ask for them: no more."""
    return int(100 * bits.per_weight(open_model(uniform))) / 100


@pytest.fixture(scope="module")
def mixed(source: Path, wanted: float, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("out") / "mixed", bits=wanted)


def test_the_bits_are_kept_and_used(mixed: Path, wanted: float) -> None:
    reached = bits.per_weight(open_model(mixed))
    assert wanted - 0.15 < reached <= wanted  # the smallest step of the smallest group is 0.1 bits of this model


def test_more_is_reached_than_by_one_scheme_of_that_size(source: Path, uniform: Path, mixed: Path) -> None:
    exact, one, many = (loaded(each) for each in (source, uniform, mixed))

    def divergence(model: Any) -> float:
        total = 0.0
        for text in windows(12)[6:]:  # that neither was made on
            full, got = (torch.log_softmax(logits(each, text).double(), -1) for each in (exact, model))
            total += float((full.exp() * (full - got)).sum())
        return total

    print(divergence(one), divergence(many))
    assert divergence(many) < divergence(one)


def test_every_matrix_is_what_its_shapes_say(mixed: Path) -> None:
    files = open_model(mixed)
    scheme = scheme_of(files)
    assert scheme.startswith("mix")
    arch = Architecture.from_config(files.config)
    stated = footprint.bits_per_weight(arch, "vq2", scheme)
    assert float(scheme.removeprefix("mix")) < bits.per_weight(files) < stated  # codes alone; with codebooks for each
    assert not (mixed / bit_mixture.FILE).exists()
    assert loaded(mixed).format == "vq2"


def test_show_and_fit_know_it(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["show", str(mixed)]) == 0
    assert "vq2 mix2." in capsys.readouterr().out
    assert cli.execute(["fit", str(mixed), "--vram", "8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["format"], row["fits"]) == ("vq2", True)


def test_what_is_told_and_measured_once(source: Path, mixed: Path, wanted: float, tmp_path: Path) -> None:
    said: list[str] = []
    steps: list[tuple[str, int, int]] = []
    asked = request(source, tmp_path / "out", bits=wanted)
    by_layer.convert(asked, lambda *each: steps.append(each), said.append)
    (line,) = said
    assert f"bits per weight (at most {wanted:g}): q k v " in line
    assert all(f"{name} " in line for name in ("o", "gate up", "down"))
    measuring = [each[1:] for each in steps if each[0] == by_layer.MEASURING]
    assert measuring == [(number, 4) for number in (0, 0, 1, 2, 2, 3, 4)]  # the embedding and the head are no steps
    assert digests(tmp_path / "out") == digests(mixed)  # again: the same bytes


def test_going_on_reads_the_choice(
    source: Path, mixed: Path, wanted: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = by_layer.quantize_layer, tmp_path / "out"

    def killed(block: Any, index: int, *rest: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return real(block, index, *rest)

    monkeypatch.setattr(by_layer, "quantize_layer", killed)
    with pytest.raises(KeyboardInterrupt):
        converted(source, out, bits=wanted)
    monkeypatch.setattr(by_layer, "quantize_layer", real)
    assert {len(schemes) for schemes in json.loads((out / bit_mixture.FILE).read_text())["schemes"]} == {4}
    with pytest.raises(LocalqError, match="a different unfinished conversion"):
        converted(source, out, bits=wanted + 0.1)
    monkeypatch.setattr(by_layer, "sensitivities", lambda *_: pytest.fail("it was measured before"))
    assert digests(converted(source, out, bits=wanted)) == digests(mixed)


def test_a_mixture_that_is_replaced_leaves_nothing(source: Path, uniform: Path, wanted: float, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_layer, "quantize_layer", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            converted(source, out, bits=wanted)
    assert (out / bit_mixture.FILE).exists()
    assert digests(converted(source, out, scheme=HALF, force=True)) == digests(uniform)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_fewer_bits_than_there_can_be(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalqError, match=r"this model needs at least \d\.\d\d bits") as caught:
        converted(source, tmp_path / "out", bits=2.01)
    assert caught.value.exit_code == ExitCode.USAGE
    assert not (tmp_path / "out").exists()  # known before anything is begun, so that other bits may follow


@pytest.mark.cuda
def test_a_gpu_chooses_as_the_cpu_does(source: Path, wanted: float, tmp_path: Path) -> None:
    folders = [converted(source, tmp_path / name, bits=wanted, device=torch.device("cuda")) for name in ("a", "b")]
    assert digests(folders[0]) == digests(folders[1])
    on_cpu = converted(source, tmp_path / "c", bits=wanted)
    # prices differ by rounding alone: groups whose prices are that near may swap, the size is the same
    assert bits.per_weight(open_model(folders[0])) == pytest.approx(bits.per_weight(open_model(on_cpu)), abs=0.02)
