"""Quantized straight from a hub: two files of the source on the disk, and the same result through every fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from localq import cli, kernels
from localq.errors import ExitCode, LocalqError
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import download
from localq.files.hub import shards as hub_shards
from localq.quantize import by_layer
from tests.support.files import fake_hub, hub_server
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import REPO
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests
from tests.support.quantize.vq2_conversions import converted
from tests.support.quantize.vq2_from_hub import (  # fmt: skip
    SETTINGS,
    SHAPE,
    cache_of,
    checkpoint,
    killed_and_gone_on,
    made,
    watched,
    weights,
    whole_fetches,
)

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return checkpoint(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def finished(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a conversion of the folder makes."""
    return digests(converted(llama, tmp_path_factory.mktemp("out") / "whole", **SETTINGS))


@pytest.fixture
def hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub_shards, "WAITS_S", (0.0,))
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, {path.name: path.read_bytes() for path in llama.iterdir()})
        yield server


def test_the_result_is_that_of_a_folder_and_every_file_is_fetched_once(hub, finished, tmp_path):
    assert made(tmp_path / "out") == finished
    assert sorted(whole_fetches(hub)) == sorted(weights(hub))
    assert len(weights(hub)) > 4
    assert not cache_of(tmp_path / "out").exists()
    assert not (tmp_path / "hub").exists() or not list((tmp_path / "hub").rglob("*.safetensors"))


@pytest.mark.parametrize("linked", [False, True], ids=["a folder", "behind a link"])
def test_never_more_than_two_files_of_the_source_are_on_the_disk(hub, finished, tmp_path, monkeypatch, linked):
    if linked:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        tmp_path = tmp_path / "link"
    taken = watched(tmp_path / "out", monkeypatch)
    assert made(tmp_path / "out") == finished
    sizes = sorted(weights(hub).values())
    assert max(sizes) < max(taken) <= sizes[-1] + sizes[-2]


def test_files_that_the_user_has_are_read_and_left(hub, finished, tmp_path):
    listing = hub_client.list_files(REPO, "main")
    mine = sorted(weights(hub))[1:3]
    paths = [download.get(listing, listing.files[name]) for name in mine]
    before = len(whole_fetches(hub))
    assert made(tmp_path / "out") == finished
    assert not set(whole_fetches(hub)[before:]) & set(mine)
    assert all(path.is_file() for path in paths)
    assert all(hub_cache.repo_folder(REPO) in path.parents for path in paths)


def test_a_configuration_that_the_user_has_changes_nothing(hub, finished, tmp_path):
    listing = hub_client.list_files(REPO, "main")
    download.get(listing, listing.files["config.json"])
    assert made(tmp_path / "out") == finished


def test_what_another_source_left_is_removed(hub, finished, tmp_path):
    other = hub_shards.open_shards(hub_server.source(), cache_of(tmp_path / "out"))
    assert other is not None
    other.close(done=False)
    left = cache_of(tmp_path / "out") / "models--org--other" / "snapshots" / ("1" * 40)
    left.mkdir(parents=True)
    assert made(tmp_path / "out") == finished
    assert not left.exists()


def test_a_damaged_file_is_named_removed_and_fetched_again(hub, finished, tmp_path):
    name = sorted(weights(hub))[2]
    content = bytearray(hub.repos[REPO].commits[fake_hub.COMMIT][name])
    content[-1] ^= 1
    hub.other_content[name] = bytes(content)
    with pytest.raises(LocalqError, match=name) as caught:
        made(tmp_path / "out")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert whole_fetches(hub).count(name) == 2
    hub.other_content.clear()
    assert made(tmp_path / "out") == finished


@pytest.mark.parametrize("faults", [3, 200], ids=["for a moment", "for long"])
def test_a_hub_that_goes_away_and_comes_back(hub, finished, tmp_path, faults):
    name = sorted(weights(hub))[3]
    hub.fail(f"/{name} whole", *[503] * faults)
    if faults > 100:
        with pytest.raises(LocalqError) as caught:
            made(tmp_path / "out")
        assert caught.value.exit_code == ExitCode.NETWORK
        assert list((tmp_path / "out").glob("model-00001-*"))
        hub.faults.clear()
    assert made(tmp_path / "out") == finished


@pytest.mark.parametrize("family", ["llama", "gemma2"], ids=["tied and turned", "tied and not turned"])
def test_a_head_that_is_the_embedding(hub, tmp_path, family):
    source = make_checkpoint(tmp_path / "tied", family, shard_bytes=80_000, **{**SHAPE, "tie_word_embeddings": True})
    hub.repos.clear()
    hub.add(REPO, {path.name: path.read_bytes() for path in source.iterdir()})
    assert made(tmp_path / "out") == digests(converted(source, tmp_path / "whole", **SETTINGS))


def test_what_goes_on_reads_the_commit_that_it_began_with(hub, finished, tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    def stop(*arguments: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(by_layer, "quantize_layer", stop)
        with pytest.raises(Interrupted):
            made(tmp_path / "out")
    hub.add(REPO, {**hub.repos[REPO].commits[fake_hub.COMMIT], "config.json": b"{}"}, commit="f" * 40)
    assert made(tmp_path / "out") == finished


def test_a_file_that_is_no_checkpoint_is_refused_by_its_header(hub, tmp_path):
    name = sorted(weights(hub))[1]
    for content in (b"\xff" * 64, b"\x08\0\0\0\0\0\0\0notjson!", b""):
        hub.repos[REPO].commits[fake_hub.COMMIT][name] = content
        with pytest.raises(LocalqError) as caught:
            made(tmp_path / "out")
        assert caught.value.exit_code == ExitCode.BAD_FILE
    assert whole_fetches(hub) == []


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(hub, llama, finished, tmp_path):
    killed_and_gone_on(llama, tmp_path, "SETTINGS", finished)


def test_the_verb_fetches_file_by_file_or_keeps_the_source(hub, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("The way of a word through a model is long. " * 200)
    common = ("quantize", REPO, "--format", "vq2", "--windows", "1", "--calibration", str(text), "--device", "cpu")
    assert cli.execute([*common, "--out", str(tmp_path / "one")]) == 0
    assert "downloaded during quantization" in capsys.readouterr().err
    assert hub_cache.find(REPO, "main") is None
    assert cli.execute([*common, "--out", str(tmp_path / "two"), "--keep-source"]) == 0
    assert hub_cache.find(REPO, "main") is not None
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    before = len(hub.requests)
    assert cli.execute([*common, "--out", str(tmp_path / "three")]) == 0  # it is here now
    assert len(hub.requests) == before
    assert hub_cache.find(REPO, "main") is not None


def test_what_cannot_begin_leaves_nothing(hub, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    assert cli.execute(["quantize", REPO, "--format", "vq2", "--out", str(tmp_path / "full"), "--device", "cpu"]) == 2
    assert not cache_of(tmp_path / "full").exists()
