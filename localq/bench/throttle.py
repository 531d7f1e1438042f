"""How long the driver held the clocks down while something was measured: for power or for heat.

A card at its power limit runs a memory-bound kernel slower in the third second than in the first, and a speed that
does not say so cannot be compared. NVML counts the time; what it does not tell is left out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from localq.bench import nvml

if TYPE_CHECKING:
    import torch

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
    return Throttle(*(nvml.card(device) or (None, None)))


def told(shares: dict[str, float]) -> str:
    """For people: "power 62 %"; empty where it is not worth a word."""
    return ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share >= WORTH_SAYING)
