"""Mixtures straight from a hub: read there and back and made, with two files of the source on the disk; kills."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from localq import cli, kernels
from localq.errors import ExitCode
from localq.files.hub import cache as hub_cache
from localq.files.hub import shards as hub_shards
from localq.files.model_folder import open_model
from localq.files.stored_format import scheme_of
from localq.quantize.model import sensitivity
from localq.quantize.output import sensitivity_log
from tests.support.files import hub_server
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import REPO
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests
from tests.support.quantize.vq2_conversions import converted
from tests.support.quantize.vq2_from_hub import (
    MIXED,
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

LAYERS = SHAPE["num_hidden_layers"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return checkpoint(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def mixed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same of bits that are mixed."""
    folder = converted(llama, tmp_path_factory.mktemp("out") / "mixed", **MIXED)
    assert scheme_of(open_model(folder)).startswith("mix")
    return digests(folder)


@pytest.fixture
def hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub_shards, "WAITS_S", (0.0,))
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, {path.name: path.read_bytes() for path in llama.iterdir()})
        yield server


def test_a_mixture_is_read_there_and_back_and_made_with_two_files_on_the_disk(hub, mixed, tmp_path, monkeypatch):
    taken = watched(tmp_path / "out", monkeypatch)
    assert made(tmp_path / "out", **MIXED) == mixed
    sizes = sorted(weights(hub).values())
    assert max(sizes) < max(taken) <= sizes[-1] + sizes[-2]
    assert whole_fetches(hub) == fetched_for_a_mixture(hub)
    assert not cache_of(tmp_path / "out").exists()


def fetched_for_a_mixture(hub: FakeHub) -> list[str]:
    """Where the way turns, two files are there already."""
    names = sorted(weights(hub))
    return [*names, *names[-3::-1], *names[2:]]


class Interrupted(Exception):
    """In the middle."""


def interrupted_at(monkeypatch: pytest.MonkeyPatch, step: int, out: Path) -> None:
    """A mixture whose measuring ends before this step of its way is recorded."""
    real, left = sensitivity_log.SensitivityLog.reach, [step]

    def reach(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sensitivity_log.SensitivityLog, "reach", reach)
        with pytest.raises(Interrupted):
            made(out, **MIXED)
    for thread in threading.enumerate():
        if thread.name == "localq-fetch":  # as nobody waits for what was fetched ahead
            thread.join()


@pytest.mark.parametrize("step", [0, 2, LAYERS, LAYERS + 2, 2 * LAYERS])
def test_what_was_measured_is_neither_measured_nor_fetched_again(hub, mixed, tmp_path, monkeypatch, step):
    out, seen = tmp_path / "out", []
    interrupted_at(monkeypatch, step, out)
    before = len(whole_fetches(hub))
    for name in ("_forward", "make_ending", "_backward"):
        call = getattr(sensitivity, name)
        monkeypatch.setattr(sensitivity, name, lambda *given, call=call: (seen.append(call), call(*given))[1])
    assert made(out, **MIXED) == mixed
    assert len(seen) == 2 * LAYERS + 1 - step
    again, whole = whole_fetches(hub)[before:], fetched_for_a_mixture(hub)
    assert again == whole[-len(again) :]
    assert before + len(again) == len(whole)


def test_a_head_that_is_the_embedding_is_read_again(hub, tmp_path):
    source = make_checkpoint(tmp_path / "tied", "gemma2", shard_bytes=80_000, **{**SHAPE, "tie_word_embeddings": True})
    hub.repos.clear()
    hub.add(REPO, {path.name: path.read_bytes() for path in source.iterdir()})
    assert made(tmp_path / "out", **MIXED) == digests(converted(source, tmp_path / "whole", **MIXED))


def test_bits_that_are_too_few_are_refused_by_the_verb_before_weights_are_fetched(hub, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("The way of a word through a model is long. " * 200)
    options = ("--format", "vq2", "--bits", "2.3", "--windows", "1", "--calibration", str(text), "--device", "cpu")
    assert cli.execute(["quantize", REPO, *options, "--out", str(tmp_path / "out")]) == ExitCode.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert "this model needs at least" in said
    assert "goes on" not in said
    assert whole_fetches(hub) == []
    assert not cache_of(tmp_path / "out").exists()
    assert hub_cache.find(REPO, "main") is None


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(hub, llama, mixed, tmp_path):
    killed_and_gone_on(llama, tmp_path, "MIXED", mixed)
