"""Drivers that do not work (reliability G6): named with cause and cure, and all that needs no GPU goes on working."""

from __future__ import annotations

import ctypes
import itertools
import json

import pytest

from localq import driver, gpus, kernels
from localq.cli import execute
from localq.cli.verbs import doctor_facts
from localq.cli.verbs.doctor_facts import Torch
from localq.gpus import NvmlReport
from localq.kernels import BuildInfo

INJECTIONS = 50
PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Mon Jan 13 20:02:09 UTC 2026\nGCC version: gcc 13\n"
# CUresult, CUDA version served -> words of the cause, and of the cure.
STATES = {
    (35, 12040): ("supports CUDA 12.4, but torch needs 13.0", "Update the driver"),
    (35, 13000): ("the driver is too old for torch's CUDA version", "Update the driver"),
    (803, 13000): (
        "different versions, probably because of a driver update; the kernel module is 570.86.15",
        "Restart the machine",
    ),
    (209, 13000): ("the driver does not support this GPU", "Update the driver"),
    (100, 13000): ("it finds no GPU", "nvidia-smi"),
    (999, 13000): ("the driver or the GPU failed", "nvidia_uvm"),
    (46, 13000): ("exclusive access to the GPU", "nvidia-smi"),
    (34, 13000): ("a stub from a CUDA toolkit", "LD_LIBRARY_PATH"),
    (802, 13000): ("fabric is not ready", "Fabric Manager"),
    (804, 13000): ("compatibility libraries do not support this GPU", "cuda-compat"),
    (777, 13000): ("CUDA error 777", "nvidia-smi"),
}


class Libcuda:
    """As ctypes loads it."""

    def __init__(self, status: int, version: int) -> None:
        self.status, self.version = status, version

    def cuDriverGetVersion(self, pointer) -> int:
        pointer._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        return self.status


@pytest.fixture
def install(monkeypatch, tmp_path):
    """install(status, version): a driver that says so; NVML says nothing unless it works."""
    for name in ("config", "data", "cache"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = tmp_path / "version"
    node.write_text(PROC)
    monkeypatch.setattr(driver, "KERNEL_NODES", (str(node),))
    monkeypatch.setattr(doctor_facts, "installed_torch", lambda: Torch("2.13.0", "13.0"))
    monkeypatch.setattr(kernels, "build_info", lambda: BuildInfo(("86",), "13.0"))
    monkeypatch.setattr(kernels, "why_not", lambda: "")
    real = ctypes.CDLL

    def install(status: int, version: int = 13000) -> None:
        library = Libcuda(status, version)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library if name == "libcuda.so.1" else real(name))
        told = ("NVML: Driver/library version mismatch",) if status else ()
        monkeypatch.setattr(gpus, "probe", lambda: NvmlReport(None, (), told))

    return install


def doctor(capsys, *arguments):
    """(exit code, stdout, stderr) of `localq doctor`."""
    code = execute(["doctor", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_each_state_is_named_with_its_cure_and_its_end_is_seen(install, capsys):
    for _, ((status, version), (cause, cure)) in zip(range(INJECTIONS), itertools.cycle(STATES.items()), strict=False):
        install(status, version)
        code, out, err = doctor(capsys)
        assert code == 7
        assert cause in err
        assert cure in err
        assert "--device cpu" in err
        assert len(err.splitlines()) == 1
        assert f"supports CUDA {version // 1000}.{version % 1000 // 10}" in out
        told = json.loads(doctor(capsys, "--json")[1])
        assert (told["usable"], told["problem"]["exit_code"]) == (False, 7)
        install(0)
        assert doctor(capsys)[0] == 0


def test_no_visible_gpu(install, capsys, monkeypatch):
    install(100)
    for hidden in ("", "7", "\u202e"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        code, out, err = doctor(capsys)
        assert code == 7
        assert "hides every GPU" in err
        assert "Unset CUDA_VISIBLE_DEVICES" in err
        assert "\u202e" not in out + err


@pytest.mark.parametrize("status", [35, 803, 209, 100, 999])
def test_what_needs_no_gpu_works_without_one(install, capsys, status):
    install(status)
    for arguments in (["--help"], ["ls"], ["show", "llama-3.1-8b"], ["fit", "--vram", "24"], ["--version"]):
        assert execute(arguments) == 0, arguments
        assert "CUDA" not in capsys.readouterr().err
    assert execute(["rm", "no-such-model"]) == 4


def test_a_kernel_module_that_does_not_tell_its_version(install, capsys, monkeypatch, tmp_path):
    install(803)
    monkeypatch.setattr(driver, "KERNEL_NODES", (str(tmp_path),))  # a folder: it cannot be read
    code, _, err = doctor(capsys)
    assert code == 7
    assert "probably because of a driver update). " in err


@pytest.mark.parametrize(
    ("vendors", "said"),
    [
        (("0x1002",), "; the AMD GPU in this machine is not supported; localq needs an NVIDIA GPU"),
        (("0x8086", "0x1002"), "; the Intel and AMD GPU in this machine is not supported; localq needs an NVIDIA GPU"),
        (("0x8086", "0x10de"), "; the NVIDIA GPU in this machine needs one"),
        ((), ""),
    ],
)
def test_without_a_driver_the_gpus_on_the_bus_are_named(install, monkeypatch, tmp_path, capsys, vendors, said):
    for number, vendor in enumerate((*vendors, "0x10de")):
        device = tmp_path / "pci" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text("0x030000\n" if number < len(vendors) else "0x040300\n")  # the last: its sound
    monkeypatch.setattr(gpus, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(driver, "probe_driver", lambda: driver.Driver(present=False, why_not="no NVIDIA driver"))
    monkeypatch.setattr(doctor_facts, "installed_torch", lambda: Torch("2.13.0", None))
    assert execute(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"no NVIDIA driver found{said}")
