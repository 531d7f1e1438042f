"""What a GPU tells of itself, by an invented NVML that answers all, something, or nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from localq import gpus
from localq.gpus import Process, Reading, Sensors, joules_between

GIB = 2**30
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


class Nvml:
    """Answers as an RTX 3090 would; a question in `broken` answers with that error, "all" breaks every one of them."""

    def __init__(self, monkeypatch, broken=None):
        self.broken, self.open, self.opened, self.handles = broken or {}, 0, 0, []
        self.reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
        processes = [SimpleNamespace(pid=11, usedGpuMemory=GIB), SimpleNamespace(pid=22, usedGpuMemory=None)]
        self.answers = {
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetClockInfo": lambda _, kind: {pynvml.NVML_CLOCK_SM: 1695, pynvml.NVML_CLOCK_MEM: 9501}[kind],
            "nvmlDeviceGetPowerUsage": lambda _: 285_400,
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 350_000,
            "nvmlDeviceGetTotalEnergyConsumption": lambda _: 1_234_567,
            "nvmlDeviceGetTemperature": lambda _, sensor: 64,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97, memory=80),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda _: self.reasons,
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=24 * GIB, free=2 * GIB, used=22 * GIB),
            "nvmlDeviceGetComputeRunningProcesses": lambda _: processes,
            "nvmlDeviceGetGraphicsRunningProcesses": lambda _: [],
        }
        monkeypatch.setattr(pynvml, "nvmlInit", self._init)
        monkeypatch.setattr(pynvml, "nvmlShutdown", self._shutdown)
        for name in self.answers:
            monkeypatch.setattr(pynvml, name, self._answer(name))
        monkeypatch.setattr(gpus, "_name", {11: "python", 22: ""}.get)

    def _init(self):
        if "nvmlInit" in self.broken:
            raise pynvml.NVMLError(self.broken["nvmlInit"])
        self.open, self.opened = self.open + 1, self.opened + 1

    def _shutdown(self):
        self.open -= 1

    def _handle(self, uuid):
        self.handles.append(uuid)
        return "device"

    def _answer(self, name):
        def answer(*arguments):
            if error := self.broken.get(name, self.broken.get("all")):
                raise pynvml.NVMLError(error)
            return self.answers[name](*arguments)

        return answer


FULL = Reading(
    at_s=5.0, sm_mhz=1695, memory_mhz=9501, watts=285.4, watts_limit=350.0, joules=1234.567, celsius=64, busy=0.97,
    held_by=("power",), total=24 * GIB, free=2 * GIB, processes=(Process(11, GIB, "python"), Process(22, None, "")),
)  # fmt: skip


def sensors() -> Sensors:
    return Sensors("GPU-5a1b", clock=lambda: 5.0)


def test_a_card_that_tells_everything(monkeypatch):
    nvml = Nvml(monkeypatch)
    looking = sensors()
    assert nvml.opened == 0  # nothing is asked before the first look
    assert [looking.read(), looking.read()] == [FULL, FULL]
    assert (nvml.opened, nvml.open, nvml.handles) == (1, 1, ["GPU-5a1b"])  # opened once, and by UUID
    looking.close()
    assert nvml.open == 0
    looking.close()
    assert nvml.open == 0


def test_the_card_is_found_whatever_cuda_hides(monkeypatch):
    nvml = Nvml(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert sensors().read() == FULL
    assert nvml.handles == ["GPU-5a1b"]


@pytest.mark.parametrize(("question", "untold"), [
    ("nvmlDeviceGetPowerUsage", {"watts": None}), ("nvmlDeviceGetEnforcedPowerLimit", {"watts_limit": None}),
    ("nvmlDeviceGetTotalEnergyConsumption", {"joules": None}), ("nvmlDeviceGetTemperature", {"celsius": None}),
    ("nvmlDeviceGetClockInfo", {"sm_mhz": None, "memory_mhz": None}), ("nvmlDeviceGetUtilizationRates", {"busy": None}),
    ("nvmlDeviceGetCurrentClocksEventReasons", {"held_by": None}),
    ("nvmlDeviceGetMemoryInfo", {"total": None, "free": None}),
])  # fmt: skip
def test_each_question_may_be_unsupported_by_itself(monkeypatch, question, untold):
    Nvml(monkeypatch, {question: NOT_SUPPORTED})
    assert sensors().read() == Reading(**{**vars(FULL), **untold})


def test_wsl_tells_nothing_of_processes(monkeypatch):
    questions = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    Nvml(monkeypatch, dict.fromkeys(questions, NOT_SUPPORTED))
    assert sensors().read() == Reading(**{**vars(FULL), "processes": None})


def test_no_driver_is_no_error_and_asked_again(monkeypatch):
    nvml = Nvml(monkeypatch, {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
    looking = sensors()
    assert looking.read() == Reading(5.0)
    nvml.broken.clear()
    assert looking.read() == FULL


def test_an_unknown_card_is_no_error_and_leaves_nothing_open(monkeypatch):
    nvml = Nvml(monkeypatch, {"nvmlDeviceGetHandleByUUID": pynvml.NVML_ERROR_NOT_FOUND})
    assert sensors().read() == Reading(5.0)
    assert (nvml.opened, nvml.open) == (1, 0)


def test_a_driver_that_was_reset_is_opened_anew(monkeypatch):
    nvml = Nvml(monkeypatch)
    looking = sensors()
    assert looking.read() == FULL
    nvml.broken["all"] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert looking.read() == Reading(5.0)
    assert nvml.open == 0
    nvml.broken.clear()
    assert looking.read() == FULL
    assert (nvml.opened, nvml.open) == (2, 1)


def test_idleness_and_set_clocks_hold_nothing_down(monkeypatch):
    nvml = Nvml(monkeypatch)
    looking = sensors()
    nvml.reasons = pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
    assert looking.read().held_by == ()
    nvml.reasons = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonSwThermalSlowdown
    assert looking.read().held_by == ("heat",)
    assert all(hasattr(pynvml, name) for name, _ in gpus.HELD_BY)


def test_joules_come_from_the_counter_else_from_power():
    counted = (Reading(1.0, watts=100.0, joules=50.0), Reading(3.0, watts=300.0, joules=470.0))
    assert joules_between(*counted) == 420.0
    assert joules_between(Reading(1.0, watts=100.0), Reading(3.0, watts=300.0)) == 400.0  # 2 s at 200 W in the mean
    assert joules_between(Reading(1.0), Reading(3.0, watts=300.0)) is None
    still = Reading(1.0, watts=100.0, joules=50.0), Reading(2.0, watts=100.0, joules=50.0)
    assert joules_between(*still) == 100.0  # a counter that was not renewed in between
