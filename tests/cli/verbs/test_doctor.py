"""What `localq doctor` says of machines of every kind. NVML and libcuda are invented; torch is read, never loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pynvml
import pytest

from localq import driver, gpus, kernels
from localq.cli import execute
from localq.cli.verbs import doctor_facts
from localq.cli.verbs.doctor_facts import Torch
from localq.driver import Driver
from localq.kernels import BuildInfo, selftest_results

GIB = 2**30
WORKING = Driver(present=True, cuda_version=(13, 0))
BUILT = BuildInfo(("80", "86", "120"), "13.0.88")


class Nvml:
    """One GPU, as the real library answers; a name in `broken` answers with that error."""

    def __init__(self, capability=(8, 6), broken=None):
        self.capability, self.broken, self.open = capability, broken or {}, 0

    def install(self, monkeypatch):
        for name in dir(self):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, self._answer(name))

    def _answer(self, name):
        def answer(*arguments):
            if name in self.broken:
                raise pynvml.NVMLError(self.broken[name])
            return getattr(self, name)(*arguments)

        return answer

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"device {index}"

    def nvmlDeviceGetName(self, device):
        return "NVIDIA GeForce RTX 3090"

    def nvmlDeviceGetUUID(self, device):
        return "GPU-5a1b"

    def nvmlDeviceGetCudaComputeCapability(self, device):
        return self.capability

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(total=24 * GIB, free=21 * GIB, used=3 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        return [SimpleNamespace(pid=11, usedGpuMemory=GIB)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, device):
        return [SimpleNamespace(pid=22, usedGpuMemory=2 * GIB), SimpleNamespace(pid=33, usedGpuMemory=None)]


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with one working GPU; calling it changes one thing or another."""
    for name in ("config", "data", "cache"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_name", {11: "python", 22: "Xorg", 33: ""}.get)
    monkeypatch.setattr(gpus, "PCI_DEVICES", tmp_path / "no bus")

    def invent(found=WORKING, torch=Torch("2.13.0", "13.0"), build=BUILT, nvml=None):  # noqa: B008 - a frozen value
        monkeypatch.setattr(driver, "probe_driver", lambda: found)
        monkeypatch.setattr(doctor_facts, "installed_torch", lambda: torch)
        monkeypatch.setattr(kernels, "build_info", lambda: build)
        monkeypatch.setattr(kernels, "why_not", lambda: "" if build else "built without CUDA")
        monkeypatch.setattr(kernels, "host_why_not", lambda: "")
        (nvml or Nvml()).install(monkeypatch)

    invent()
    return invent


def doctor(capsys, *arguments):
    """(exit code, stdout, stderr) of `localq doctor`."""
    code = execute(["doctor", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_one_working_gpu(capsys):
    code, out, err = doctor(capsys)
    assert (code, err) == (0, "")
    assert "NVIDIA 580.65.06, supports CUDA 13.0" in out
    assert "NVIDIA GeForce RTX 3090, sm_86, kernels supported, 21,504 MiB of 24,576 MiB free" in out
    held = [line.strip() for line in out.splitlines() if "process" in line]
    assert held == [
        "process 22 (Xorg): 2,048 MiB", "process 11 (python): 1,024 MiB", "process 33: unknown memory use",
    ]  # fmt: skip
    assert out.splitlines()[-1].split(None, 1) == ["usable", "yes, on NVIDIA GeForce RTX 3090"]


def test_no_driver_is_usable_on_the_cpu(capsys, machine):
    machine(Driver(present=False, why_not="no NVIDIA driver"), Torch("2.13.0+cpu", None), None)
    code, out, err = doctor(capsys)
    assert (code, err) == (0, "")
    assert "2.13.0+cpu, a CPU build" in out
    assert "none: built without CUDA" in out
    assert out.splitlines()[-1].split(None, 1) == ["usable", "yes, but only on the CPU: no NVIDIA driver found"]


OLD = Driver(present=True, cuda_version=(12, 4))
HIDDEN = Driver(present=True, why_not="it finds no GPU", cuda_version=(13, 0))
UNUSABLE = [
    ({"found": OLD}, "driver is too old: it supports CUDA 12.4, but torch needs 13.0", "Update the driver"),
    ({"found": HIDDEN}, "an NVIDIA driver is installed, but it finds no GPU", "nvidia-smi"),
    ({"nvml": Nvml((7, 5))}, "built for sm_80, sm_86, sm_120, but this GPU is sm_75", "kernels for this GPU"),
    ({"build": None}, "kernels cannot be used: built without CUDA", "Run `make chat` again"),
    ({"torch": Torch("2.13.0+cpu", None)}, "torch is a CPU-only build", "Install a CUDA build of torch"),
]


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize(("change", "why", "step"), UNUSABLE, ids=[why[:30] for _, why, _ in UNUSABLE])
def test_an_unusable_gpu_is_exit_7_with_the_next_step(capsys, machine, change, why, step, arguments):
    machine(**change)
    code, out, err = doctor(capsys, *arguments)
    assert code == 7
    assert why in err
    assert step in err
    assert "--device cpu" in err
    if arguments:
        told = json.loads(out)
        assert (told["usable"], told["problem"]["exit_code"]) == (False, 7)
        assert told["problem"]["why"] in err
    else:
        assert not out.splitlines()[-1].startswith("usable")


def test_missing_torch_is_an_error_that_names_it(capsys, machine):
    machine(torch=None)
    code, out, err = doctor(capsys)
    assert code == 1
    assert "torch: not installed" in err
    assert "torch        not installed" in out


def test_broken_settings_are_told_after_everything_else(capsys, monkeypatch):
    monkeypatch.setenv("LOCALQ_DEVICE", "gpu")
    code, out, err = doctor(capsys)
    assert code == 2
    assert "RTX 3090" in out
    assert "gpu" in err


def test_json_is_one_line_with_sizes_in_bytes(capsys, tmp_path):
    code, out, _ = doctor(capsys, "--json")
    assert (code, out.count("\n")) == (0, 1)
    told = json.loads(out)
    assert (told["schema"], told["usable"], told["device"], told["problem"]) == (1, True, "cuda", None)
    (gpu,) = told["gpus"]
    assert (gpu["total"], gpu["free"], gpu["capability"]) == (24 * GIB, 21 * GIB, [8, 6])
    assert (gpu["kernels_run"], gpu["first"]) == (True, True)
    assert gpu["processes"][2] == {"pid": 33, "bytes": None, "name": ""}
    assert told["torch"] == {"version": "2.13.0", "cuda": "13.0"}
    assert told["folders"]["models"]["path"] == str(tmp_path / "hub")
    assert told["folders"]["data"]["free_bytes"] > 0
    assert told["embedded"] == {"smollm2-135m": False}


ASKED = [name for name in dir(Nvml) if name.startswith("nvml") and name != "nvmlShutdown"]


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST])
def test_whatever_nvml_refuses_is_told_and_not_fatal(capsys, machine, name, error):
    nvml = Nvml(broken={name: error})
    machine(nvml=nvml)
    code, out, err = doctor(capsys)
    assert (code, err) == (0, "")
    assert "unavailable" in out
    assert str(pynvml.NVMLError(error)) in out
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 0), ("1", 1), ("1,0", 1), ("GPU-b", 1), ("7", None), ("", None)],
)
def test_the_first_gpu_is_the_first_that_is_visible(monkeypatch, visible, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    both = tuple(gpus.Gpu(index, "X", uuid, None, None, None, None) for index, uuid in enumerate(("GPU-a1", "GPU-b2")))
    first = gpus.first_visible(both)
    assert (first.index if first else None) == expected


def test_the_installed_torch_is_read_as_torch_tells_it():
    command = (
        "import sys; from localq.cli.verbs import doctor_facts as d;"
        "print(d.gather().torch); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=60)
    import torch

    assert done.stdout.splitlines() == [str(Torch(torch.__version__, torch.version.cuda)), "False"]


@pytest.mark.cuda
def test_this_machine(monkeypatch):
    monkeypatch.undo()
    facts = doctor_facts.gather()
    assert facts.driver.present
    assert facts.first is not None
    assert facts.first.capability is not None
    assert doctor_facts.problem(facts) is None


@pytest.mark.parametrize(
    ("failed", "code", "says"),
    [(None, 0, "not yet run"), ("", 0, "passed"), ("nf4_gemv", 7, "failed: wrong results from nf4_gemv")],
    ids=["never run", "passed", "failed"],
)
def test_the_self_test_of_the_kernels(capsys, failed, code, says):
    if failed is not None:
        here = selftest_results.Place("NVIDIA GeForce RTX 3090", "GPU-5a1b", (8, 6), "580.65.06")
        assert selftest_results.remember(here, selftest_results.SelftestResult(here.gpu, here.driver, failed)) == ""
    got, out, err = doctor(capsys)
    assert got == code
    assert next(line.split(None, 1)[1] for line in out.splitlines() if line.startswith("self-test")).startswith(says)
    assert ("the self-test of the nf4_gemv kernel failed" in err) == (code == 7)
    body = json.loads(doctor(capsys, "--json")[1])
    assert body["selftest"] == (
        None if failed is None else {"gpu": "NVIDIA GeForce RTX 3090", "driver": "580.65.06", "failed": failed}
    )
