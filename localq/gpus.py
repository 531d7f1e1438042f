"""The GPUs of this machine, as NVIDIA's management library (NVML) tells them: no CUDA context, no torch.

Every question is asked by itself, because each may be unsupported: WSL tells nothing about processes, some virtual
GPUs nothing about memory. What cannot be told is None, and why is kept.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMED = 3  # processes of a refusal


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a GPU; `bytes` is None where NVML may not tell, `name` empty where nobody does."""

    pid: int
    bytes: int | None
    name: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` counts as NVML counts (by bus id); sizes in bytes; None = not told."""

    index: int
    name: str
    uuid: str | None
    capability: tuple[int, int] | None
    total: int | None
    free: int | None
    processes: tuple[Process, ...] | None


@dataclass(frozen=True)
class Found:
    """What NVML tells: the driver's version (such as "580.65.06"), the GPUs, and what it refused to tell, with why."""

    driver_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    untold: tuple[str, ...] = ()


def probe() -> Found:
    """Ask NVML. Raises nothing: without NVML the answer is empty and says why."""
    import pynvml  # type: ignore[import-untyped]  # start-up cost: few verbs need it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Found(untold=(f"NVML: {error}",))
    untold: list[str] = []

    def ask(what: str, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except pynvml.NVMLError as error:
            untold.append(f"{what}: {error}")
            return None

    try:
        version = ask("driver version", pynvml.nvmlSystemGetDriverVersion)
        count = ask("number of GPUs", pynvml.nvmlDeviceGetCount) or 0
        gpus = tuple(gpu for index in range(count) if (gpu := _gpu(index, ask)) is not None)
        return Found(version, gpus, tuple(untold))
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # everything was told already
            pynvml.nvmlShutdown()


def _gpu(index: int, ask: Callable[..., Any]) -> Gpu | None:
    import pynvml

    device = ask(f"GPU {index}", pynvml.nvmlDeviceGetHandleByIndex, index)
    if device is None:
        return None
    name = ask(f"GPU {index} name", pynvml.nvmlDeviceGetName, device)
    uuid = ask(f"GPU {index} UUID", pynvml.nvmlDeviceGetUUID, device)
    capability = ask(f"GPU {index} compute capability", pynvml.nvmlDeviceGetCudaComputeCapability, device)
    memory = ask(f"GPU {index} memory", pynvml.nvmlDeviceGetMemoryInfo, device)
    total, free = (int(memory.total), int(memory.free)) if memory is not None else (None, None)
    held = processes(index, device, ask)
    return Gpu(index, name or "NVIDIA GPU", uuid, tuple(capability) if capability else None, total, free, held)


def processes(index: int, device: Any, ask: Callable[..., Any]) -> tuple[Process, ...] | None:
    """Processes that compute or draw on `device` (a handle of NVML), each once, the largest first; None = not told.

    `ask(what, question, *arguments)` gives the answer to a question, or None.
    """
    import pynvml

    kinds = (
        ("compute", pynvml.nvmlDeviceGetComputeRunningProcesses),
        ("graphics", pynvml.nvmlDeviceGetGraphicsRunningProcesses),
    )
    answers = [ask(f"GPU {index} {kind} processes", question, device) for kind, question in kinds]
    if all(answer is None for answer in answers):
        return None
    found = {each.pid: (each.pid, each.usedGpuMemory) for answer in answers for each in answer or ()}
    named = [Process(pid, size, _name(pid)) for pid, size in found.values()]
    return tuple(sorted(named, key=lambda each: -(each.bytes or 0)))


def _name(pid: int) -> str:
    """What the system calls a process; empty for one of another container, or that has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def of_uuid(uuid: str) -> Gpu | None:
    """The GPU of that UUID, as it is now."""
    return next((gpu for gpu in probe().gpus if gpu.uuid == uuid), None)


def closing(gpu: Gpu | None, own_pid: int | None = None) -> str:
    """How others could make room on `gpu`: "by closing firefox (pid 4711, 812 MiB)", the three largest."""
    others = [each for each in (gpu.processes if gpu else None) or () if each.pid != own_pid]
    if not others:
        return "by closing other programs that use the GPU"
    told = []
    for each in others[:NAMED]:
        size = "" if each.bytes is None else f", {each.bytes // 2**20:,} MiB"
        told.append(f"{each.name or 'a process'} (pid {each.pid}{size})")
    return f"by closing {', '.join(told)}"


def first_visible(gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that CUDA counts as its first: by CUDA_VISIBLE_DEVICES (a number or a UUID's beginning), else number 0.

    CUDA may count other than NVML where GPUs differ (CUDA_DEVICE_ORDER); a machine with one GPU is always right.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    for gpu in gpus:
        if first == str(gpu.index) or (first.startswith("GPU-") and (gpu.uuid or "").startswith(first)):
            return gpu
    return None


# Reasons for held-down clocks in the order in which they are told, by the name of their bit in NVML. Idleness and
# clocks that a person has set are no reasons to wonder.
HELD_BY = (
    ("nvmlClocksEventReasonSwPowerCap", "power"),
    ("nvmlClocksEventReasonHwPowerBrakeSlowdown", "power brake"),
    ("nvmlClocksEventReasonSwThermalSlowdown", "heat"),
    ("nvmlClocksEventReasonHwThermalSlowdown", "heat"),
    ("nvmlClocksEventReasonHwSlowdown", "hardware"),
)


@dataclass(frozen=True)
class Reading:
    """One look at a GPU; None = not told.

    at_s          on the clock of the sensors
    sm_mhz, memory_mhz, celsius
    watts, watts_limit   drawn by the whole card, and the limit that is in force
    joules        counted by the driver since it was loaded, of the whole card
    busy          share of the last second or so in which a kernel ran, 0 to 1
    held_by       what holds the clocks down; empty: nothing does
    total, free   bytes of memory
    processes     that hold memory of it
    """

    at_s: float = 0.0
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    watts: float | None = None
    watts_limit: float | None = None
    joules: float | None = None
    celsius: int | None = None
    busy: float | None = None
    held_by: tuple[str, ...] | None = None
    total: int | None = None
    free: int | None = None
    processes: tuple[Process, ...] | None = None


def joules_between(before: Reading, after: Reading) -> float | None:
    """What the card took from one reading to the next: by its counter, else by its power (trapezoid rule)."""
    if before.joules is not None and after.joules is not None and after.joules > before.joules:
        return after.joules - before.joules
    if before.watts is None or after.watts is None:
        return None
    return (after.at_s - before.at_s) * (before.watts + after.watts) / 2


class Sensors:
    """The GPU of that UUID, whatever CUDA_VISIBLE_DEVICES hides. One thread at a time may read."""

    def __init__(self, uuid: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Asks nothing yet."""
        self._uuid, self._clock = uuid, clock
        self._device: Any = None

    def read(self) -> Reading:
        """What the GPU tells now: some milliseconds, or longer where the driver is in trouble."""
        import pynvml  # start-up cost: only a GPU on show is asked

        if self._device is None and not self._open(pynvml):
            return Reading(self._clock())
        reading = self._read(pynvml)
        if reading == Reading(reading.at_s):
            self.close()
        return reading

    def close(self) -> None:
        """Let go of the library; `read` opens it again."""
        if self._device is not None:
            import pynvml

            self._device = None
            with contextlib.suppress(pynvml.NVMLError):  # it is gone already
                pynvml.nvmlShutdown()

    def _open(self, pynvml: Any) -> bool:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver, or one that does not answer
            return False
        try:
            self._device = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except pynvml.NVMLError:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        return self._device is not None

    def _read(self, pynvml: Any) -> Reading:
        from localq import gpus  # start-up cost, as above

        def ask(_what: str, question: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return question(*arguments)
            except pynvml.NVMLError:  # `localq doctor` says what a driver does not tell
                return None

        def told(name: str, *arguments: Any) -> Any:
            return ask("", getattr(pynvml, name), self._device, *arguments)

        memory, use = told("nvmlDeviceGetMemoryInfo"), told("nvmlDeviceGetUtilizationRates")
        return Reading(
            at_s=self._clock(),
            sm_mhz=told("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            memory_mhz=told("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            watts=_thousandths(told("nvmlDeviceGetPowerUsage")),
            watts_limit=_thousandths(told("nvmlDeviceGetEnforcedPowerLimit")),
            joules=_thousandths(told("nvmlDeviceGetTotalEnergyConsumption")),
            celsius=told("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            busy=None if use is None else use.gpu / 100,
            held_by=_held_by(pynvml, told("nvmlDeviceGetCurrentClocksEventReasons")),
            total=None if memory is None else int(memory.total),
            free=None if memory is None else int(memory.free),
            processes=gpus.processes(0, self._device, ask),
        )


def _thousandths(count: int | None) -> float | None:
    return None if count is None else count / 1e3


def _held_by(pynvml: Any, bits: int | None) -> tuple[str, ...] | None:
    if bits is None:
        return None
    return tuple(dict.fromkeys(word for name, word in HELD_BY if bits & getattr(pynvml, name)))
