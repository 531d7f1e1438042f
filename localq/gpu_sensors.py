"""What one GPU does right now, as NVML tells: clocks, power, heat, use, why its clocks are held down, memory. No torch.

For instruments that look once a second, so the library stays open between readings. Every question is asked by itself,
because each may be unsupported (WSL2 tells little, data-centre cards in parts less): what is not told is None, and
nothing here raises. After a reading that told nothing, the library is opened anew: the driver may have been reset.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # start-up cost
    from localq.gpus import Process

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
        import pynvml  # type: ignore[import-untyped]  # start-up cost: only a GPU on show is asked

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
