"""What a bare `localq bench` picks, on invented disks and cards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from localq import driver, gpus
from localq.bench.models import choose
from localq.bench.models.choose import BenchChoice, from_facts
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.files.local_models import LocalModel
from tests.support.models.tiny_checkpoints import make_checkpoint

GIB = 2**30
CTX = 640
ENTRIES = catalog.load_catalogue()


def local(name: str, format: str = "nf4", complete: bool = True) -> LocalModel:
    return LocalModel(name, format, Path("/models") / name, 1, "hub", complete, 0.0)


def shape(model: LocalModel):
    return catalog.find(model.name).arch


def test_the_largest_quantized_model_on_the_disk_that_fits_in_fp16():
    disk = [local("llama-3.2-1b"), local("llama-3.1-8b"), local("llama-3.3-70b"), local("smollm2-135m", "gguf")]
    assert from_facts(24 * GIB, CTX, disk, ENTRIES, shape) == BenchChoice("llama-3.1-8b", path="/models/llama-3.1-8b")
    assert from_facts(8 * GIB, CTX, disk, ENTRIES, shape).name == "llama-3.2-1b"
    broken = [local("llama-3.2-1b"), local("llama-3.1-8b", complete=False)]
    assert from_facts(24 * GIB, CTX, broken, ENTRIES, shape).name == "llama-3.2-1b"


@pytest.mark.parametrize("format", choose.quantized_formats())
def test_whatever_format_it_is_quantized_in(format):
    disk = [local("llama-3.2-1b"), local("llama-3.1-8b", format)]
    assert from_facts(24 * GIB, CTX, disk, ENTRIES, shape).name == "llama-3.1-8b"


def test_all_that_is_quantized_and_runs_counts():
    assert {*choose.quantized_formats(), *format_facts.full_precision()} == set(format_facts.FORMATS)


def test_of_one_model_in_two_formats_that_with_the_faster_kernels():
    vptq, nf4 = (replace(local("llama-3.1-8b", format), path=Path("/models") / format) for format in ("vptq", "nf4"))
    for disk in ([vptq, nf4], [nf4, vptq]):
        assert from_facts(24 * GIB, CTX, disk, ENTRIES, shape).path == "/models/nf4"


def test_what_no_kernel_reads_together_is_left_out():
    disk = [local("llama-3.2-1b"), local("qwen3-30b-a3b", "awq")]  # experts in AWQ run one by one
    assert from_facts(80 * GIB, CTX, disk, ENTRIES, shape).name == "llama-3.2-1b"
    assert from_facts(80 * GIB, CTX, [disk[0], local("qwen3-30b-a3b")], ENTRIES, shape).name == "qwen3-30b-a3b"


def test_a_layout_that_is_not_read_is_left_out(tmp_path):
    path = make_checkpoint(tmp_path / "awq") / "config.json"
    config = json.loads(path.read_text())
    for version, known in (("gemm", True), ("gemv", False)):
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "version": version}
        path.write_text(json.dumps(config))
        found = choose.architecture_of(replace(local("some-8b", "awq"), path=path.parent))
        assert (found is not None) == known


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
    choice = choose.choose(CTX)
    assert choice.name == "smollm2-135m"
    assert "on the CPU" in choice.note
    assert not choice.synthetic
    assert choose.choose(CTX, device="cpu").name == "smollm2-135m"


def test_what_stays_free_is_not_filled(monkeypatch):
    card = gpus.Gpu(0, "card", "GPU-aaaa", (8, 9), 24 * GIB, 24 * GIB, None)
    monkeypatch.setattr(driver, "probe_driver", lambda: driver.Driver(present=True))
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (card,), ()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose.choose(CTX, synthetic=True) == from_facts(24 * GIB, CTX, [], ENTRIES, shape)
    reserving = choose.choose(CTX, synthetic=True, reserve_bytes=16 * GIB)
    assert reserving == from_facts(8 * GIB, CTX, [], ENTRIES, shape) != choose.choose(CTX, synthetic=True)
