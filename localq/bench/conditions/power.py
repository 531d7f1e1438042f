"""Energy and clock limits of a GPU by NVML: the energy counter, or power integrated over time; throttling by cause.

The counter covers the whole card, with the desktop and other programs. Values that NVML does not report are None.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch


def card(device: torch.device) -> tuple[Any, Any] | None:
    """Return (pynvml, handle of `device`); None on the CPU and where NVML fails.

    NVML stays initialized, which costs nothing, until the process ends.
    """
    if device.type != "cuda":
        return None
    import pynvml  # type: ignore[import-untyped]  # only benchmarks need it
    import torch  # reports import this module without torch

    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


POLICIES = {"power": "NVML_PERF_POLICY_POWER", "heat": "NVML_PERF_POLICY_THERMAL"}
WORTH_SAYING = 0.01  # fraction of the time that is reported


class Throttle:
    """Throttling: cause -> fraction of the time since `start` in which the driver lowered the clocks for it."""

    def __init__(self, nvml: Any, card: Any) -> None:
        """Take pynvml, initialized, and a card; None, None without a GPU."""
        self._nvml, self._card = nvml, card
        self._before: dict[str, int] = {}
        self._started = 0.0

    def start(self) -> None:
        """Start counting."""
        self._before, self._started = self._counters(), time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Return the fractions since `start`; empty where nothing is counted."""
        elapsed = (time.perf_counter() - self._started) * 1e9
        after = self._counters()
        return {
            cause: min(1.0, max(0, after[cause] - before) / elapsed)
            for cause, before in self._before.items()
            if cause in after
        }

    def _counters(self) -> dict[str, int]:
        """Return the counters in nanoseconds since the driver was loaded."""
        found = {}
        for cause, policy in POLICIES.items() if self._nvml is not None else ():
            try:
                status = self._nvml.nvmlDeviceGetViolationStatus(self._card, getattr(self._nvml, policy))
            except self._nvml.NVMLError:  # this card does not count it
                continue
            found[cause] = int(status.violationTime)
        return found


def throttle(device: torch.device) -> Throttle:
    """Return the `Throttle` of `device`."""
    return Throttle(*(card(device) or (None, None)))


def summary(shares: dict[str, float]) -> str:
    """Return text for people: "power 62%"; empty for negligible throttling."""
    return ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share >= WORTH_SAYING)


SAMPLE_S = 0.02  # between two readings of the power, which drivers update every 20 to 100 ms


class NoMeter:
    """The meter of the CPU, and of GPUs that report neither energy nor power."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> float | None:
        """Return None: unknown."""
        return None


class CounterMeter:
    """The difference of two readings of the energy counter, which counts millijoules since the driver was loaded."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle, self._before = nvml, handle, 0

    def start(self) -> None:
        """Read the counter."""
        self._before = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)

    def stop(self) -> float | None:
        """Return the joules since `start`; None also where the counter, updated every 20 to 100 ms, has not moved."""
        with contextlib.suppress(self._nvml.NVMLError):  # the driver no longer reports it
            after = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            return (after - self._before) / 1e3 if after > self._before else None
        return None


class PowerMeter:
    """Power in milliwatts, read by a thread and integrated by the trapezoid rule."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._readings: list[tuple[float, float]] = []  # seconds, watts
        self._thread = threading.Thread()
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread that reads the power."""
        self._readings, self._ended = [], threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """Return the joules since `start`; None with fewer than two readings."""
        self._ended.set()
        self._thread.join()
        return integrate(self._readings) if len(self._readings) > 1 else None

    def _sample(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):  # fewer than two readings: the answer is None
            while True:
                self._readings.append((time.perf_counter(), self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3))
                if self._ended.wait(SAMPLE_S):
                    self._readings.append((time.perf_counter(), self._readings[-1][1]))
                    return


def integrate(readings: list[tuple[float, float]]) -> float:
    """Integrate (seconds, watts), ascending in time, to joules by the trapezoid rule."""
    pairs = itertools.pairwise(readings)
    return sum((later - earlier) * (watts + after) / 2 for (earlier, watts), (later, after) in pairs)


def meter(device: torch.device) -> NoMeter | CounterMeter | PowerMeter:
    """Return the best meter that `device` supports."""
    found = card(device)
    if found is None:
        return NoMeter()
    pynvml, handle = found
    meters = ((CounterMeter, pynvml.nvmlDeviceGetTotalEnergyConsumption), (PowerMeter, pynvml.nvmlDeviceGetPowerUsage))
    for kind, question in meters:
        with contextlib.suppress(pynvml.NVMLError):  # unsupported by this card: try the next one
            question(handle)
            return kind(pynvml, handle)
    return NoMeter()
