"""What a bare `localq bench` picks, on invented disks and cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localq import catalog, driver, gpus
from localq.bench import choose
from localq.bench.choose import Choice, from_facts
from localq.errors import ExitCode, LocalqError
from localq.local_models import LocalModel

GIB = 2**30
CTX = 640
ENTRIES = catalog.load_catalogue()


def local(name: str, format: str = "nf4", complete: bool = True) -> LocalModel:
    return LocalModel(name, format, Path("/models") / name, 1, "hub", complete, 0.0)


def shape(model: LocalModel):
    return catalog.find(model.name).arch


def test_the_largest_quantized_model_on_the_disk_that_fits_in_fp16():
    disk = [local("llama-3.2-1b"), local("llama-3.1-8b"), local("llama-3.3-70b"), local("smollm2-135m", "gguf")]
    assert from_facts(24 * GIB, CTX, disk, ENTRIES, shape) == Choice("llama-3.1-8b", path="/models/llama-3.1-8b")
    assert from_facts(8 * GIB, CTX, disk, ENTRIES, shape).name == "llama-3.2-1b"
    broken = [local("llama-3.2-1b"), local("llama-3.1-8b", complete=False)]
    assert from_facts(24 * GIB, CTX, broken, ENTRIES, shape).name == "llama-3.2-1b"


def test_otherwise_random_weights_sized_to_the_card():
    unreadable = from_facts(24 * GIB, CTX, [local("llama-3.1-8b")], ENTRIES, lambda model: None)
    assert unreadable.synthetic
    small, large = (from_facts(size * GIB, CTX, [], ENTRIES, shape) for size in (8, 24))
    assert small.synthetic
    assert catalog.find(small.name).arch.parameters < catalog.find(large.name).arch.parameters
    assert 2 * catalog.find(large.name).arch.parameters < 24 * GIB
    assert "random weights" in large.note
    with pytest.raises(LocalqError, match="fits") as caught:
        from_facts(GIB // 2, CTX, [], ENTRIES, shape)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_context_that_the_model_was_not_made_for_does_not_fit():
    disk = [local("llama-3.1-8b")]
    assert from_facts(80 * GIB, 200_000, disk, ENTRIES, lambda m: replace(shape(m), max_context=8192)).synthetic


def test_without_a_gpu_the_embedded_model_is_measured_and_that_is_said(monkeypatch):
    monkeypatch.setattr(driver, "probe_driver", lambda: driver.Driver(present=False))
    choice = choose.bare(CTX)
    assert choice.name == "smollm2-135m"
    assert "on the CPU" in choice.note
    assert not choice.synthetic
    assert choose.bare(CTX, device="cpu").name == "smollm2-135m"


def test_what_stays_free_is_not_filled(monkeypatch):
    card = gpus.Gpu(0, "card", "GPU-aaaa", (8, 9), 24 * GIB, 24 * GIB, None)
    monkeypatch.setattr(driver, "probe_driver", lambda: driver.Driver(present=True))
    monkeypatch.setattr(gpus, "probe", lambda: gpus.Found("580", (card,), ()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose.bare(CTX, synthetic=True) == from_facts(24 * GIB, CTX, [], ENTRIES, shape)
    reserving = choose.bare(CTX, synthetic=True, reserve_bytes=16 * GIB)
    assert reserving == from_facts(8 * GIB, CTX, [], ENTRIES, shape) != choose.bare(CTX, synthetic=True)
