"""Which device is taken on machines of every kind, and what is said when the GPU cannot be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from localq import driver, kernels
from localq.driver import CudaStack, Driver, probe_driver
from localq.engine.load.device import NO_DRIVER_NOTE, pick
from localq.errors import ExitCode, LocalqError

WORKING = Driver(present=True, cuda_version=(13, 0))


def unprobed() -> CudaStack:
    raise AssertionError("the CPU was asked for: nothing needs probing")


def test_cpu_is_taken_without_looking():
    choice = pick("cpu", unprobed)
    assert (choice.device.type, choice.notes) == ("cpu", ())


def test_auto_without_a_driver_takes_the_cpu_and_says_so():
    choice = pick("auto", lambda: CudaStack(Driver(present=False), torch_cuda=None))
    assert (choice.device.type, choice.notes) == ("cpu", (NO_DRIVER_NOTE,))


@pytest.mark.parametrize("word", ["auto", "cuda"])
def test_a_working_gpu_is_taken(word):
    choice = pick(word, lambda: CudaStack(WORKING, "12.8"))
    assert (str(choice.device), choice.notes) == ("cuda:0", ())


BROKEN = [
    (CudaStack(WORKING, None), "torch is a CPU-only build"),
    (CudaStack(Driver(present=True, cuda_version=(12, 4)), "13.0"), "too old: it supports CUDA 12.4, .* needs 13.0"),
    (CudaStack(Driver(present=True, why_not="it finds no GPU"), "13.0"), "it finds no GPU"),
    (CudaStack(Driver(present=True, why_not="CUDA error 803", cuda_version=(13, 0)), "13.0"), "CUDA error 803"),
    (
        CudaStack(WORKING, "13.0", torch_why="no machine code for X (sm_61)"),
        "torch cannot use the GPU: no machine code",
    ),
    (CudaStack(WORKING, "13.0", kernels_why="built without CUDA"), "kernels cannot be used: built without CUDA"),
]


@pytest.mark.parametrize("word", ["auto", "cuda"])
@pytest.mark.parametrize(("machine", "why"), BROKEN, ids=[why for _, why in BROKEN])
def test_a_gpu_that_cannot_be_used_is_an_error_never_the_cpu(word, machine, why):
    with pytest.raises(LocalqError, match=why) as caught:
        pick(word, lambda: machine)
    assert caught.value.exit_code == ExitCode.NO_DEVICE
    assert "--device cpu" in caught.value.next_step


def test_cuda_without_a_driver_is_an_error():
    with pytest.raises(LocalqError, match="no NVIDIA driver found") as caught:
        pick("cuda", lambda: CudaStack(Driver(present=False), None))
    assert caught.value.exit_code == ExitCode.NO_DEVICE


def test_unknown_word_is_a_usage_error():
    with pytest.raises(LocalqError, match="'gpu' is not a supported device") as caught:
        pick("gpu", unprobed)
    assert caught.value.exit_code == ExitCode.USAGE


STUB = "int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }} int cuInit(unsigned f) {{ return {status}; }}"


@pytest.fixture
def stub_driver(tmp_path, monkeypatch):
    """Puts a libcuda in place whose cuInit returns `status`, with or without the kernel half of the driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a stub of libcuda with")

    def build(status: int, version: int = 12080, kernel_half: bool = True) -> None:
        library = tmp_path / f"libcuda{status}.so"
        source = STUB.format(version=version, status=status)
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=source.encode(), check=True)
        real = ctypes.CDLL
        monkeypatch.setattr(ctypes, "CDLL", lambda name: real(str(library) if name == "libcuda.so.1" else name))
        node = tmp_path / "node"
        node.touch()
        monkeypatch.setattr(driver, "KERNEL_NODES", (str(node),) if kernel_half else (str(tmp_path / "none"),))
        monkeypatch.setattr(driver, "WSL_NODE", str(tmp_path / "none"))

    return build


def test_probe_of_a_working_driver(stub_driver):
    stub_driver(0)
    assert probe_driver() == Driver(present=True, cuda_version=(12, 8))


def test_probe_names_hidden_gpus(stub_driver, monkeypatch):
    stub_driver(100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = probe_driver()
    assert found.present
    assert 'CUDA_VISIBLE_DEVICES=""' in found.why_not
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert probe_driver().why_not == "it finds no GPU"


def test_library_without_the_kernel_half_is_no_driver(stub_driver):
    stub_driver(100, kernel_half=False)
    assert not probe_driver().present


def test_probe_keeps_the_error_of_the_driver(stub_driver):
    stub_driver(803)
    found = probe_driver()
    assert found.present
    assert "803" in found.why_not


def test_kernel_half_without_the_library(tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(driver, "KERNEL_NODES", (str(tmp_path),))
    found = probe_driver()
    assert found.present
    assert "libcuda.so.1 cannot be loaded" in found.why_not
    monkeypatch.setattr(driver, "KERNEL_NODES", (str(tmp_path / "none"),))
    assert not probe_driver().present


@pytest.mark.cuda
def test_this_machine():
    choice = pick("auto")
    assert choice.device.type == "cuda"
    assert kernels.available()
