"""RAM is counted before a conversion begins, in every format: exit 3, and nothing is made."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from localq import kernels
from localq.errors import ExitCode, LocalqError
from localq.files import format_facts
from localq.files.model_folder import open_model
from localq.formats import FORMATS
from localq.formats.checkpoint import info
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner import ram
from localq.quantize import by_layer, by_tensor, memory
from localq.quantize.bits.binary_mixture import BitBudget
from localq.quantize.model.input_moments import CalibrationText
from localq.quantize.output.tensor_jobs import plan_jobs
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.vq2_conversions import request

TEXT = CalibrationText([list(range(3, 35))] * 3, torch.device("cpu"))
BY_LAYER = [format for format, made in format_facts.writable().items() if made.made_from == "text"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama")


def refused(convert: Callable[[], object], out: Path, free: str) -> LocalqError:
    with pytest.raises(LocalqError, match=f"of RAM, but only {free} is free") as caught:
        convert()
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("format", format_facts.writable())
def test_too_little_ram_is_seen_before_anything_is_made(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr(ram, "free_ram", lambda: ram.Ram(1000, "float32"))
    out = tmp_path / "out"
    if format in BY_LAYER:
        if not kernels.host_available():
            pytest.skip(f"no search: {kernels.host_why_not()}")
        scheme = {} if format == "vq2" else {"scheme": ""}
        error = refused(lambda: by_layer.convert(request(llama, out, format=format, **scheme)), out, "1.0 kB")
        assert "--windows" in error.next_step
        return
    files = open_model(llama)
    error = refused(lambda: by_tensor.convert(TensorwiseRequest(files, format, out)), out, "1.0 kB")
    assert error.next_step == "Close other programs."
    if format_facts.of(format).weighs_text:
        weighed = TensorwiseRequest(files, format, out, text=TEXT)
        assert "--windows" in refused(lambda: by_tensor.convert(weighed), out, "1.0 kB").next_step
    if format == "bcq":
        mixed = TensorwiseRequest(files, format, out, budget=BitBudget(2.5, TEXT))
        assert "--windows" in refused(lambda: by_tensor.convert(mixed), out, "1.0 kB").next_step


@pytest.mark.parametrize("format", sorted(format_facts.formats_by_tensor()))
def test_where_memory_runs_out_only_options_that_the_format_has_are_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    def greedy(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(by_tensor, "_write_shards", greedy)
    with pytest.raises(LocalqError, match="ran out of memory while quantizing") as caught:
        by_tensor.convert(TensorwiseRequest(open_model(llama), format, tmp_path / "out"))
    assert caught.value.next_step == "Close other programs. Completed work is saved."


def test_a_limit_of_the_address_space_counts_as_memory(llama: Path, tmp_path: Path) -> None:
    """As `ulimit -v`: the system would refuse what seems to be free."""
    code = (
        "import pathlib, psutil, resource, sys\n"
        "from localq.files.model_folder import open_model\n"
        "from localq.quantize import by_tensor, memory\n"
        "from localq.quantize.request import TensorwiseRequest\n"
        "limit = psutil.Process().memory_info().vms + 2**27\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "memory.check_ram('small', 2**20)\n"
        "memory.check_ram('large', 2**28)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert "LocalqError: large: quantization needs up to 268.4 MB of RAM, but only" in run.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def test_the_count_of_a_tensor(llama: Path) -> None:
    """The source, what is written, and temporaries of one matrix, also of a stack of experts."""
    module = FORMATS["nf4"]
    large = info(torch.bfloat16, (4096, 8192))
    name = "model.layers.0.mlp.up_proj.weight"
    jobs = plan_jobs({name: large, "model.norm.weight": info(torch.float32, (8,))}, module, "safetensors")
    written = sum(each.nbytes for job in jobs for each in job.outputs.values() if job.quantized)
    assert memory.tensor_bytes(jobs, "nf4") == large.nbytes + written + 4096 * 8192
    stack = info(torch.bfloat16, (8, 2 * 256, 512))
    jobs = plan_jobs({"model.layers.0.mlp.experts.gate_up_proj": stack}, module, "safetensors", "qwen3_moe")
    written = sum(each.nbytes for job in jobs for each in job.outputs.values())
    assert memory.tensor_bytes(jobs, "nf4") == stack.nbytes + written + 256 * 512
    with open_checkpoint(open_model(llama)) as checkpoint:
        jobs = plan_jobs(checkpoint.tensors, module, "safetensors")
    hidden = 64
    assert memory.text_bytes(jobs, TEXT.windows, hidden, on_gpu=True) == 2 * 3 * 32 * hidden
    layer = sum(job.source.nbytes // 2 for job in jobs if job.quantized and ".layers.0." in job.name)
    assert memory.text_bytes(jobs, TEXT.windows, hidden, on_gpu=False) == 2 * 3 * 32 * hidden + 4 * layer


PEAK = """
import sys, torch
from localq.formats import FORMATS
torch.set_num_threads(1)
module, shape = FORMATS[sys.argv[1]], (int(sys.argv[2]), 4096)
def resident(peak):
    key = "VmHWM" if peak else "VmRSS"
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
module.quantize(torch.randn(8, 256).bfloat16())
weight = torch.randn(shape).bfloat16()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins now
start = resident(peak=False)
module.quantize(weight)
print((resident(peak=True) - start) / weight.numel())
"""


@pytest.mark.parametrize(("format", "rows"), [("nf4", 4096), ("mxfp4", 4096), ("bcq", 512)])
def test_temporaries_are_about_what_is_measured(format: str, rows: int) -> None:
    command = [sys.executable, "-c", PEAK, format, str(rows)]
    run = subprocess.run(command, check=True, capture_output=True, timeout=120)
    per_weight = float(run.stdout)  # with what is written: half a byte
    assert -1 < per_weight - format_facts.of(format).temporaries < 3
