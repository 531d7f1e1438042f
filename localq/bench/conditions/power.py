"""Joules that a GPU takes, as NVML tells: its energy counter, or, where there is none, power integrated over time.

The counter is of the whole card: the desktop and other programs are in it. What NVML does not tell is None.
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
    """(pynvml, handle of `device`); None on the CPU and where NVML does not answer.

    Leaves NVML initialised, which costs nothing, until the process ends.
    """
    if device.type != "cuda":
        return None
    import pynvml  # type: ignore[import-untyped]  # only benchmarks ask
    import torch  # reports import what asks here, and load none

    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


POLICIES = {"power": "NVML_PERF_POLICY_POWER", "heat": "NVML_PERF_POLICY_THERMAL"}
WORTH_SAYING = 0.01  # share of the time


class Throttle:
    """Cause -> share of the time since `start` in which the clocks were held down for it."""

    def __init__(self, nvml: Any, card: Any) -> None:
        """nvml: pynvml, initialised; None, None where there is nothing to ask."""
        self._nvml, self._card = nvml, card
        self._before: dict[str, int] = {}
        self._started = 0.0

    def start(self) -> None:
        """From here on."""
        self._before, self._started = self._counters(), time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Until here; empty where nothing is counted."""
        elapsed = (time.perf_counter() - self._started) * 1e9
        after = self._counters()
        return {
            cause: min(1.0, max(0, after[cause] - before) / elapsed)
            for cause, before in self._before.items()
            if cause in after
        }

    def _counters(self) -> dict[str, int]:
        """Nanoseconds since the driver was loaded."""
        found = {}
        for cause, policy in POLICIES.items() if self._nvml is not None else ():
            try:
                status = self._nvml.nvmlDeviceGetViolationStatus(self._card, getattr(self._nvml, policy))
            except self._nvml.NVMLError:  # this card does not count it
                continue
            found[cause] = int(status.violationTime)
        return found


def throttle(device: torch.device) -> Throttle:
    """For `device`."""
    return Throttle(*(card(device) or (None, None)))


def summary(shares: dict[str, float]) -> str:
    """For people: "power 62 %"; empty where it is not worth a word."""
    return ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share >= WORTH_SAYING)


SAMPLE_S = 0.02  # between two readings of the power; drivers renew it every 20 to 100 ms


class NoMeter:
    """For the CPU, and for GPUs that tell neither energy nor power."""

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> float | None:
        """Unknown."""
        return None


class CounterMeter:
    """The difference of two readings of the energy counter, which counts millijoules since the driver was loaded."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle, self._before = nvml, handle, 0

    def start(self) -> None:
        """See `measure.Meter`."""
        self._before = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)

    def stop(self) -> float | None:
        """See `measure.Meter`. None too where the counter has not moved: it is renewed every 20 to 100 ms."""
        with contextlib.suppress(self._nvml.NVMLError):  # the driver tells no longer
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
        """See `measure.Meter`."""
        self._readings, self._ended = [], threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        """See `measure.Meter`."""
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
    """Joules under (seconds, watts), ascending in time, by the trapezoid rule."""
    pairs = itertools.pairwise(readings)
    return sum((later - earlier) * (watts + after) / 2 for (earlier, watts), (later, after) in pairs)


def meter(device: torch.device) -> NoMeter | CounterMeter | PowerMeter:
    """The best meter that `device` has."""
    found = card(device)
    if found is None:
        return NoMeter()
    pynvml, handle = found
    meters = ((CounterMeter, pynvml.nvmlDeviceGetTotalEnergyConsumption), (PowerMeter, pynvml.nvmlDeviceGetPowerUsage))
    for kind, question in meters:
        with contextlib.suppress(pynvml.NVMLError):  # not supported by this card: try the next way
            question(handle)
            return kind(pynvml, handle)
    return NoMeter()
