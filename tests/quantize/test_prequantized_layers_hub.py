"""Ready layers and a source on the hub: the files of embedding, head and last norm are fetched, and no others."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from localq import kernels
from localq.cli import execute
from localq.errors import ExitCode
from localq.files.hub import cache as hub_cache
from localq.files.hub import shards as hub_shards
from tests.support.files import hub_server
from tests.support.files.fake_hub import COMMIT, FakeHub
from tests.support.files.hub_server import REPO
from tests.support.quantize.conversions import model_digests
from tests.support.quantize.vq2_conversions import converted
from tests.support.quantize.vq2_from_hub import SETTINGS, cache_of, checkpoint, weights, whole_fetches

PACK = Path(__file__).parents[1] / "tools/pack_layers.py"
pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A source, what was made of it, and the layers of that."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("made")
    source = checkpoint(folder / "source")
    model = converted(source, folder / "model", **SETTINGS)
    pack = runpy.run_path(str(PACK))["pack"]
    return source, model, pack(model, source, folder / "layers", "a test", SETTINGS["seed"])


@pytest.fixture
def hub(made: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub_shards, "WAITS_S", (0.0,))
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, {path.name: path.read_bytes() for path in made[0].iterdir()})
        yield server


def ends(source: Path) -> list[str]:
    """The files that hold what is no layer's."""
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    return sorted({file for name, file in index.items() if ".layers." not in name})


def quantized(out: Path, layers: Path) -> int:
    return execute(["quantize", REPO, "--format", "vq2", "--layers", str(layers), "--out", str(out)])


def test_only_what_is_no_layers_is_fetched_and_nothing_is_left(hub, made, tmp_path):
    source, model, layers = made
    assert quantized(tmp_path / "out", layers) == ExitCode.OK
    assert model_digests(tmp_path / "out") == model_digests(model)
    assert whole_fetches(hub) == ends(source)
    assert len(ends(source)) < len(weights(hub)) - 2
    assert not cache_of(tmp_path / "out").exists()
    assert hub_cache.find(REPO, "main") is None


def test_files_whose_sha256_the_hub_does_not_say_are_fetched_for_it(hub, made, tmp_path):
    _, model, layers = made
    hub.repos[REPO].lfs = frozenset()
    assert quantized(tmp_path / "out", layers) == ExitCode.OK
    assert model_digests(tmp_path / "out") == model_digests(model)
    assert set(whole_fetches(hub)) == set(weights(hub))


def test_another_model_is_refused_before_its_weights_are_fetched(hub, made, tmp_path, capsys):
    files = hub.repos[REPO].commits[COMMIT]
    name = sorted(weights(hub))[3]
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    assert quantized(tmp_path / "out", made[2]) == ExitCode.USAGE
    assert "the layers were not quantized from" in " ".join(capsys.readouterr().err.split())
    assert whole_fetches(hub) == []
    assert not (tmp_path / "out").exists()
    assert not cache_of(tmp_path / "out").exists()
