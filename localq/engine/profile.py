"""Profile of one decode step: every operation of the fused step, measured inside a replay of its graph.

CUPTI's records of one replay are the better clock: they do not change the launches. A kernel counts from the end of the
one before to its own end: programmatic dependent launch starts it early, and until the other has ended it only
prepares and waits. So the sum is the step. An eager run with a marker between the operations shows which records belong
to which operation. Where CUPTI is unavailable (no permission, another profiler), a graph with an event between the
operations is timed, which adds a little to each of them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch's gap
from torch.profiler import ProfilerActivity

from localq.engine.load.device import capture_stream
from localq.engine.step.fused import FusedStep, Launch
from localq.engine.step.state import Readback
from localq.engine.step.steps import Steps
from localq.errors import ExitCode, LocalqError
from localq.stats import Operation, StepProfile

REPLAYS = 20  # the result is their median
STEADY = 64  # tokens of steady decoding, to measure the host gap
REPEATED = STEADY + REPLAYS  # positions that a profile takes
_MARKER = "FillFunctor"  # in the name of the kernel that `Tensor.zero_` runs; no operation of a step has it
_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class KernelRecord:
    """One kernel on the device: microseconds from the start of the trace."""

    name: str
    start_us: float
    end_us: float


def profile_step(step: FusedStep, readback: Readback, ctx: int, position: int, greedy: bool) -> StepProfile:
    """Profile `step` at `clamp_position(position, ctx)`, which may raise.

    Overwrites the cache from there on and the state of the step; earlier slots are only read.
    """
    position = clamp_position(position, ctx)
    launches = step.launches(greedy)
    graph = _capture(step, lambda: step.run(greedy), position)
    step.state.rewind(position)
    step_us = _back_to_back_us(graph, min(STEADY, ctx - position - 1))
    step.state.rewind(position)
    token_us = _steady_us(graph, readback, min(STEADY, ctx - position - 1))
    step.state.rewind(position)
    replays = min(REPLAYS, ctx - position - 2)
    times, timer = _by_cupti(step, launches, greedy, replays), "cupti"
    if times is None:
        step.state.rewind(position)
        times, timer = _by_events(step, launches, replays), "events"
    rows = group_by_operation(launches, times, position + 1)
    return StepProfile(rows, step_us, max(0.0, token_us - step_us), position, timer)


def clamp_position(position: int, ctx: int) -> int:
    """Return `position`, moved back until the repetitions fit into `ctx` slots.

    Raises LocalqError (exit 2) for a context too short to repeat a step.
    """
    if ctx < REPLAYS:
        why = f"a context length of {ctx} is too short for {REPLAYS} steps"
        raise LocalqError("profile", why, "Use a larger --ctx.", ExitCode.USAGE)
    return max(0, min(position, ctx - REPEATED))


def group_by_operation(launches: Sequence[Launch], times_us: Sequence[float], live: int) -> tuple[Operation, ...]:
    """Return one row per kind of operation, in order of first use."""
    rows: dict[str, Operation] = {}
    for launch, us in zip(launches, times_us, strict=True):
        row = rows.get(launch.operation, Operation(launch.operation, 0, 0.0, 0))
        rows[row.kernel] = Operation(row.kernel, row.calls + 1, row.us + us, row.bytes + launch.bytes(live))
    return tuple(rows.values())


def _capture(step: FusedStep, enqueue: Callable[[], None], position: int) -> torch.cuda.CUDAGraph:
    """Capture the launches of `enqueue` and replay them once at `position`, which uploads the graph."""
    graph = _graph(enqueue, step.state.token.device)
    step.state.rewind(position)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _graph(enqueue: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # thread-local: driver calls of the profiler's own thread must not break the capture
    with torch.cuda.graph(graph, stream=capture_stream(device), capture_error_mode="thread_local"):
        enqueue()
    return graph


def _back_to_back_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Return the device time per replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


def _steady_us(graph: torch.cuda.CUDAGraph, readback: Readback, count: int) -> float:
    """Return the wall time per token of the loop of `Engine`: one step ahead, every token read by the host."""
    torch.cuda.synchronize()
    graph.replay()
    readback.push()
    started = time.perf_counter()
    for _ in range(count - 1):
        graph.replay()
        readback.push()
        readback.take()
    readback.take()
    return (time.perf_counter() - started) * 1e6 / count


def pass_seconds(steps: Steps, ctx: int, rows: int, count: int) -> float:
    """Return the median wall time of a greedy step of `rows` rows at the end of a context, awaited by the host.

    Writes over the cache there. Raises LocalqError (exit 2) for a context that is too short.
    """
    if ctx < rows:
        why = f"a context length of {ctx} is too short for a pass of {rows} rows"
        raise LocalqError("profile", why, "Use a larger --ctx.", ExitCode.USAGE)
    steps.readback.forget()
    times = []
    for _ in range(count + 1):
        steps.state.rewind(ctx - rows)
        started = time.perf_counter()
        if rows > 1:
            steps.draft((), rows)
        steps.launch(ctx - rows, greedy=True, rows=rows)
        steps.readback.take()
        times.append(time.perf_counter() - started)
    steps.state.rewind()
    return statistics.median(times[1:])


# ---- by kernel records


def _by_cupti(step: FusedStep, launches: Sequence[Launch], greedy: bool, replays: int) -> list[float] | None:
    """Return the microseconds of every launch, None where CUPTI records no kernel."""
    marker = torch.zeros(1, dtype=torch.int8, device=step.state.token.device)
    position = int(step.state.position)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        graph = _capture(step, lambda: step.run(greedy), position)  # captured here, so that CUPTI sees it
        step.state.rewind(position)
        torch.cuda.synchronize()
        for launch in launches:
            marker.zero_()
            launch.run()
        marker.zero_()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    records = [
        KernelRecord(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and not event.name.startswith(_COPIES)
    ]
    if not any(_MARKER in record.name for record in records):
        return None
    return attribute_records(records, len(launches), replays)


def attribute_records(records: Sequence[KernelRecord], launches: int, replays: int) -> list[float]:
    """Return the microseconds of every launch from kernel records.

    Ordered by start, the records end in launches with a marker before each and one after the last, then `replays` of
    the same launches without markers. Raises LocalqError where the replays have other kernels.
    """
    ordered = sorted(records, key=lambda record: record.start_us)
    marks = [i for i, record in enumerate(ordered) if _MARKER in record.name][-launches - 1 :]
    counts = [after - before - 1 for before, after in itertools.pairwise(marks)]
    names = [record.name for record in ordered[marks[0] :] if _MARKER not in record.name]
    rest = ordered[marks[-1] + 1 :]
    once = sum(counts)
    if len(counts) != launches or len(rest) != once * replays or names != names[:once] * (replays + 1):
        why = f"{replays} replays recorded {len(rest)} kernels, but one step has {once} ({len(counts)} operations)"
        raise LocalqError("profile", why, "Report this as a bug.")
    samples: list[list[float]] = [[] for _ in counts]
    for replay in range(replays):
        part = rest[replay * once : (replay + 1) * once]
        ends = [part[0].start_us, *itertools.accumulate((record.end_us for record in part), max)]
        first = 0
        for sample, count in zip(samples, counts, strict=True):
            sample.append(ends[first + count] - ends[first])
            first += count
    return [statistics.median(sample) for sample in samples]


# ---- by events


def _by_events(step: FusedStep, launches: Sequence[Launch], replays: int) -> list[float]:
    """Return the microseconds of every launch from a graph with an event before each and one after the last."""
    events = [
        torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
        for _ in range(len(launches) + 1)
    ]

    def enqueue() -> None:
        for launch, event in zip(launches, events, strict=False):
            event.record()
            launch.run()
        events[-1].record()

    position = int(step.state.position)
    graph = _capture(step, enqueue, position)
    step.state.rewind(position)
    samples: list[list[float]] = [[] for _ in launches]
    for _ in range(replays):
        graph.replay()
        torch.cuda.synchronize()
        for sample, before, after in zip(samples, events, events[1:], strict=False):
            sample.append(float(before.elapsed_time(after)) * 1e3)
    return [statistics.median(sample) for sample in samples]
