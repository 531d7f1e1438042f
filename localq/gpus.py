"""GPUs of this machine and their sensors, from NVML: no CUDA context, no torch.

Each query may be unsupported (WSL: processes; some virtual GPUs: memory), so each is made separately. A missing value
is None, and its reason is recorded.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMED = 3  # processes that an error names
PCI_DEVICES = Path("/sys/bus/pci/devices")
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}


@dataclass(frozen=True)
class Process:
    """A process with GPU memory; `bytes` None and `name` empty = unknown."""

    pid: int
    bytes: int | None
    name: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is NVML's (by bus id); sizes in bytes; None = unknown."""

    index: int
    name: str
    uuid: str | None
    capability: tuple[int, int] | None
    total: int | None
    free: int | None
    processes: tuple[Process, ...] | None


@dataclass(frozen=True)
class NvmlReport:
    """Driver version (such as "580.65.06"), GPUs, and the queries that failed, with the reason."""

    driver_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    unavailable: tuple[str, ...] = ()


def probe() -> NvmlReport:
    """Query NVML. Never raises: without NVML the report is empty and gives the reason."""
    import pynvml  # type: ignore[import-untyped]  # start-up cost: few verbs need it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlReport(unavailable=(f"NVML: {error}",))
    unavailable: list[str] = []

    def ask(what: str, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except pynvml.NVMLError as error:
            unavailable.append(f"{what}: {error}")
            return None

    try:
        version = ask("driver version", pynvml.nvmlSystemGetDriverVersion)
        count = ask("number of GPUs", pynvml.nvmlDeviceGetCount) or 0
        gpus = tuple(gpu for index in range(count) if (gpu := _gpu(index, ask)) is not None)
        return NvmlReport(version, gpus, tuple(unavailable))
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # all answers are in
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
    """Compute and graphics processes on `device` (an NVML handle), largest first; None = unknown.

    `ask(what, question, *arguments)` returns the answer to a query, or None.
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
    """Name of a process; empty for one that has ended or runs in another container."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def vendors() -> tuple[str, ...]:
    """The makers of the GPUs on the PCI bus, whether a driver is installed or not; none where the bus is unknown."""
    found = []
    for device in sorted(PCI_DEVICES.glob("*")):
        with contextlib.suppress(OSError):
            if (device / "class").read_text().startswith("0x03"):  # a display controller
                found.append(VENDORS.get((device / "vendor").read_text().strip(), ""))
    return tuple(dict.fromkeys(filter(None, found)))


def of_uuid(uuid: str) -> Gpu | None:
    """The current state of the GPU with this UUID."""
    return next((gpu for gpu in probe().gpus if gpu.uuid == uuid), None)


def closing_hint(gpu: Gpu | None, own_pid: int | None = None) -> str:
    """Return how to free memory on `gpu`: "by closing firefox (pid 4711, 812 MiB)", the three largest processes."""
    others = [each for each in (gpu.processes if gpu else None) or () if each.pid != own_pid]
    if not others:
        return "by closing other programs that are using the GPU"
    names = []
    for each in others[:NAMED]:
        size = "" if each.bytes is None else f", {each.bytes // 2**20:,} MiB"
        names.append(f"{each.name or 'a process'} (pid {each.pid}{size})")
    return f"by closing {', '.join(names)}"


def first_visible(gpus: tuple[Gpu, ...]) -> Gpu | None:
    """CUDA's first GPU: by CUDA_VISIBLE_DEVICES (a number or the start of a UUID), else number 0.

    With different GPUs CUDA's order may differ from NVML's (CUDA_DEVICE_ORDER).
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    for gpu in gpus:
        if first == str(gpu.index) or (first.startswith("GPU-") and (gpu.uuid or "").startswith(first)):
            return gpu
    return None


def fit_command() -> str:
    """`localq fit` as errors name it: where no GPU is usable, with the size of a card, which it then needs."""
    gpu = first_visible(probe().gpus)
    usable = gpu is not None and gpu.total is not None and gpu.free is not None
    return "`localq fit`" if usable else "`localq fit --vram 24 --all`"


# Reasons for reduced clocks, in the order shown, by their name in NVML. Idle and user-set clocks are left out.
HELD_BY = (
    ("nvmlClocksEventReasonSwPowerCap", "power"),
    ("nvmlClocksEventReasonHwPowerBrakeSlowdown", "power brake"),
    ("nvmlClocksEventReasonSwThermalSlowdown", "heat"),
    ("nvmlClocksEventReasonHwThermalSlowdown", "heat"),
    ("nvmlClocksEventReasonHwSlowdown", "hardware"),
)


@dataclass(frozen=True)
class Reading:
    """One reading of a GPU's sensors; None = unknown.

    at_s          on the clock of the sensors
    sm_mhz, memory_mhz, celsius
    watts, watts_limit   power of the whole card, and its limit
    joules        energy of the whole card since the driver was loaded
    busy          share of the last second or so in which a kernel ran, 0 to 1
    held_by       reasons for reduced clocks; empty: none
    total, free   bytes of memory
    processes     with memory on it
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
    """Energy between two readings: by the counter, else by power (trapezoid rule)."""
    if before.joules is not None and after.joules is not None and after.joules > before.joules:
        return after.joules - before.joules
    if before.watts is None or after.watts is None:
        return None
    return (after.at_s - before.at_s) * (before.watts + after.watts) / 2


class Sensors:
    """Sensors of the GPU with a UUID, also of a hidden one. Only one thread at a time may read."""

    def __init__(self, uuid: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Set up without opening NVML."""
        self._uuid, self._clock = uuid, clock
        self._device: Any = None

    def read(self) -> Reading:
        """Read the sensors: some milliseconds, longer if the driver hangs."""
        import pynvml  # start-up cost

        if self._device is None and not self._open(pynvml):
            return Reading(self._clock())
        reading = self._read(pynvml)
        if reading == Reading(reading.at_s):
            self.close()
        return reading

    def close(self) -> None:
        """Close NVML; `read` opens it again."""
        if self._device is not None:
            import pynvml

            self._device = None
            with contextlib.suppress(pynvml.NVMLError):  # already closed
                pynvml.nvmlShutdown()

    def _open(self, pynvml: Any) -> bool:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver, or it does not respond
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
            except pynvml.NVMLError:  # `localq doctor` reports unavailable values
                return None

        def query(name: str, *arguments: Any) -> Any:
            return ask("", getattr(pynvml, name), self._device, *arguments)

        memory, use = query("nvmlDeviceGetMemoryInfo"), query("nvmlDeviceGetUtilizationRates")
        return Reading(
            at_s=self._clock(),
            sm_mhz=query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            memory_mhz=query("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            watts=_thousandths(query("nvmlDeviceGetPowerUsage")),
            watts_limit=_thousandths(query("nvmlDeviceGetEnforcedPowerLimit")),
            joules=_thousandths(query("nvmlDeviceGetTotalEnergyConsumption")),
            celsius=query("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            busy=None if use is None else use.gpu / 100,
            held_by=_held_by(pynvml, query("nvmlDeviceGetCurrentClocksEventReasons")),
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
