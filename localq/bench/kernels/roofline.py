"""Roofline for kernels: the measured read bandwidth of this device, and timings with a cold L2 cache.

Cold means that the data of a launch was not touched by the launches before it: they take turns over copies whose sum is
more than twice the cache. Launches are captured in one CUDA graph, as decoding does, so that the gap between two of
them is the device's own and not the interpreter's. To start a graph takes some 8 us by itself, whatever it has; a step
of decoding has hundreds of launches, so these take as many turns as make that less than a hundredth.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.kernels.workspace import captured_for

GIB = 2**30
CPU_BUFFER_BYTES, GPU_BUFFER_BYTES = GIB // 4, 4 * GIB
REPEATS = 10
GRAPH_US = 1500.0  # a graph takes at least, so that its start does not count
ROW = 2**16  # f32 elements of a row, where rows are reduced one by one

# Ways to read a buffer f32 [a multiple of ROW]: to one number, to one number a row, or multiplied by a vector.
PROBES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "largest": torch.amax,
    "sums of rows": lambda buffer: buffer.view(-1, ROW).sum(1),
    "sums of rows, bfloat16": lambda buffer: buffer.view(torch.bfloat16).view(-1, ROW).sum(1),
    "product, float16": lambda buffer: torch.mv(
        buffer.view(torch.float16).view(-1, ROW // 8), torch.ones(ROW // 8, dtype=torch.float16, device=buffer.device)
    ),
}
CPU_PROBES = ("sum", "largest")


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch: median and extremes over the replays, each replay averaged over its copies."""

    median_us: float
    low_us: float
    high_us: float


def read_bytes_per_s(device: torch.device) -> float:
    """The read bandwidth of `device`: the best of `read_probes`."""
    return max(read_probes(device).values())


def read_probes(device: torch.device) -> dict[str, float]:
    """Bytes/s of several ways to read a buffer larger than the caches, the best of all repetitions of each.

    More than one, because torch reaches another speed with each of them, and a roof that is too low flatters.
    """
    size = CPU_BUFFER_BYTES
    if device.type == "cuda":
        size = min(GPU_BUFFER_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    buffer = torch.ones(size // (4 * ROW) * ROW, dtype=torch.float32, device=device)
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    candidates = {name: PROBES[name] for name in (PROBES if device.type == "cuda" else CPU_PROBES)}
    return {
        name: buffer.nbytes / min(timed(reduction, buffer) for _ in range(REPEATS))
        for name, reduction in candidates.items()
    }


def _cpu_seconds(reduction: Callable[[Tensor], Tensor], buffer: Tensor) -> float:
    started = time.perf_counter()
    reduction(buffer)
    return time.perf_counter() - started


def _gpu_seconds(reduction: Callable[[Tensor], Tensor], buffer: Tensor) -> float:
    before, after = _event(), _event()
    before.record()
    reduction(buffer)
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def copies_for_cold_cache(bytes_each: int, cache_bytes: int) -> int:
    """Return the number of copies of `bytes_each` to cycle through: over twice the cache in total, at least two."""
    return 2 * cache_bytes // bytes_each + 2


def time_cold(launches: Sequence[Callable[[], object]], replays: int = 30) -> Timing:
    """Time of one of `launches`, which do the same on different copies. Runs them all before, as a warm-up."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's gap
    stream.wait_stream(torch.cuda.current_stream())
    with captured_for(torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            for launch in launches:
                launch()
        stream.synchronize()
        graph = _captured(launches, stream)
        _replay_us(graph)
        turns = turns_for(_replay_us(graph))
        if turns > 1:
            graph = _captured([*launches] * turns, stream)
            _replay_us(graph)
    microseconds = [_replay_us(graph) / (turns * len(launches)) for _ in range(replays)]
    return Timing(statistics.median(microseconds), min(microseconds), max(microseconds))


def turns_for(graph_us: float) -> int:
    """Return the number of turns to capture in a graph, given the time of one turn with the graph's start."""
    return max(1, math.ceil(GRAPH_US / max(graph_us, 1.0)))


def _captured(launches: Sequence[Callable[[], object]], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    before, after = _event(), _event()
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's gap
