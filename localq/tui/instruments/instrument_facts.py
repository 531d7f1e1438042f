"""Data of the instruments: speed, memory, profile of a decode step, sensors. Without widgets.

Every stream event passes through `add`, which is cheap and draws nothing. Panels that share one `InstrumentFacts` show
the same data and read the sensors once.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from localq.gpus import Reading, Sensors, joules_between
from localq.stats import Stats

if TYPE_CHECKING:
    from localq.planner.speed.roofline import Roof
    from localq.worker.messages import Loaded

SLICE_S = 1.0  # of decoding, one point of the graph
SLICES = 240  # seconds of decoding that are kept
LATER = 2  # growth of the context after which a new profile is due
LOOK_S = 1.0  # between two readings of the sensors
TRIES = 3  # of a profile; the model may be busy
_LEAST = 256  # positions; growth below this is ignored


@dataclass
class Slice:
    """Part of a reply: tokens, seconds of decoding, and the positions in use at its end."""

    tokens: float
    seconds: float
    used: int

    @property
    def tokens_per_s(self) -> float:
        """Speed of the slice."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Speed:
    """Decode speed in slices, from the engine's decode times; pauses between replies do not count."""

    def __init__(self) -> None:
        self.slices: collections.deque[Slice] = collections.deque(maxlen=SLICES)
        self.last = Stats()
        self.running = False
        self._own = 0  # slices that the running reply began
        self._finished: list[Slice] = []  # of the reply before

    def add(self, stats: Stats) -> None:
        """Add statistics of the running reply, or of the next one, which may end with its first event."""
        if stats == self.last:
            return
        if not self.running or stats.generated_tokens < self.last.generated_tokens:
            self._finished = self.curve
            self.running, self._own, self.last = True, 0, Stats()
        tokens = max(0, stats.generated_tokens - 1) - max(
            0, self.last.generated_tokens - 1
        )  # the first is the prefill's
        seconds = stats.decode_s - self.last.decode_s
        self.last = stats
        if seconds > 0:
            self._pour(tokens / seconds, min(seconds, SLICES * SLICE_S), stats.context_used)
        self.running = stats.phase != "done"

    def end(self) -> None:
        """End the reply."""
        self.running = False

    @property
    def now(self) -> float:
        """tok/s over the last second or two of the running reply; 0 without one."""
        late = list(self.slices)[-min(2, self._own) :] if self.running and self._own else []
        seconds = sum(each.seconds for each in late)
        return sum(each.tokens for each in late) / seconds if seconds else 0.0

    @property
    def curve(self) -> list[Slice]:
        """Slices of the running reply; until it has one, and after it, those of the last."""
        return list(self.slices)[-self._own :] if self._own else self._finished

    def _pour(self, tokens_per_s: float, seconds: float, used: int) -> None:
        while seconds > 1e-9:
            if not self._own or self.slices[-1].seconds >= SLICE_S - 1e-9:
                self.slices.append(Slice(0.0, 0.0, used))
                self._own += 1
            part = self.slices[-1]
            taken = min(seconds, SLICE_S - part.seconds)
            part.tokens, part.seconds, part.used = part.tokens + tokens_per_s * taken, part.seconds + taken, used
            seconds -= taken


@dataclass(frozen=True)
class Sample:
    """A profile (`StepProfile.to_dict()`) and its time."""

    profile: dict[str, Any]
    at_s: float


class InstrumentFacts:
    """Filled by panels, read by their widgets; belongs to the drawing thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sensors: Callable[[str], Sensors] = Sensors
    ) -> None:
        """sensors: opens the sensors of the GPU with a UUID."""
        self.clock, self._sensors = clock, sensors
        self.loaded: Loaded | None = None
        self.limit: int | None = None  # bytes of the card that the model may use, where `--vram` sets that
        self.roof: Roof | None = None
        self.speed = Speed()
        self.sample: Sample | None = None
        self.untimed = ""  # error of the last profile
        self.reading = Reading()
        self.look: Callable[[], Reading] | None = None  # reads the sensors, or host memory; in any thread
        self.looking = False  # a reading is in progress
        self.looked_s = -LOOK_S  # start of the last reading
        self.asked = self.wanted = False  # a profile: requested and not received; requested by the user
        self._failures = 0  # since the last profile
        self.changed: set[Callable[[], None]] = set()  # called after every change
        self._joules = self._metered = 0.0  # of the last reply, between readings
        self._read_at_tokens = 0

    # ---- input

    def load(self, loaded: Loaded, limit: int | None = None) -> None:
        """Reset for a new load. limit: bytes of `--vram`."""
        from localq.planner.speed import roofline  # start-up cost: not needed before the first frame

        self.loaded, self.sample, self.untimed, self.reading = loaded, None, "", Reading()
        self.look = partial(read_gpu, self._sensors(loaded.gpu_uuid)) if self.on_gpu else read_host_memory
        self.limit = limit if self.on_gpu else None
        self.speed, self.asked, self._failures = Speed(), False, 0
        self._joules = self._metered = 0.0
        found = roofline.bandwidth(loaded.gpu_uuid, loaded.device_name) if loaded.reads else None
        self.roof = roofline.Roof(roofline.Reads(**loaded.reads), found) if found else None
        self._notify()

    def add(self, stats: Stats) -> None:
        """Add a stream event of a reply."""
        if not self.speed.running and stats != self.speed.last:
            self._joules = self._metered = 0.0
            self._read_at_tokens = -1
        self.speed.add(stats)
        self._notify()

    def end(self) -> None:
        """End the reply."""
        self.speed.end()
        self._notify()

    def add_profile(self, profile: dict[str, Any]) -> None:
        """Add a new profile."""
        self.sample, self.untimed, self.asked, self._failures = Sample(profile, self.clock()), "", False, 0
        self._notify()

    def add_profile_failure(self, why: str) -> None:
        """Note that a profile failed, and why."""
        self.untimed, self.asked, self._failures = why, False, self._failures + 1
        self._notify()

    def add_reading(self, reading: Reading) -> None:
        """Add a reading of the sensors."""
        tokens = self.speed.last.generated_tokens
        if self.speed.running and self._read_at_tokens >= 1 and tokens > self._read_at_tokens:
            joules = joules_between(self.reading, reading)
            if joules is not None:
                self._joules, self._metered = self._joules + joules, self._metered + tokens - self._read_at_tokens
        self._read_at_tokens = tokens if self.speed.running else -1
        self.reading = reading
        self._notify()

    def _notify(self) -> None:
        for each in tuple(self.changed):
            each()

    # ---- derived

    @property
    def on_gpu(self) -> bool:
        """True if the loaded model runs on a GPU."""
        return self.loaded is not None and self.loaded.device == "cuda"

    @property
    def joules_per_token(self) -> float | None:
        """Energy per token of the last reply; None where the card reports neither energy nor power."""
        return self._joules / self._metered if self._metered else None

    @property
    def profile_due(self) -> bool:
        """True if a profile is due: requested, never taken, or the context has grown by `LATER` since."""
        if not self.on_gpu or self.speed.running or self.asked:
            return False
        if self.wanted or self._failures >= TRIES:
            return self.wanted
        if self.sample is None or self.untimed:
            return True
        return self.speed.last.context_used >= LATER * max(_LEAST, int(self.sample.profile["position"]))


def read_gpu(sensors: Sensors) -> Reading:
    """A reading of the GPU's sensors, without our own processes."""
    reading = sensors.read()
    if reading.processes is None:
        return reading
    return replace(reading, processes=tuple(each for each in reading.processes if not is_ours(each.pid)))


def read_host_memory() -> Reading:
    """Memory of this machine, for a model on the CPU."""
    import psutil  # type: ignore[import-untyped]  # start-up cost: only for visible instruments

    memory = psutil.virtual_memory()
    return Reading(time.monotonic(), total=memory.total, free=memory.available)


def is_ours(pid: int) -> bool:
    """Return whether `pid` is this process or an engine process of it."""
    import psutil

    try:
        return os.getpid() in (pid, psutil.Process(pid).ppid())
    except psutil.Error:  # of another user or container, or ended
        return False
