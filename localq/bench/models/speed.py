"""Decode speed and memory of a loaded model, measured as by `localq bench`, in one test."""

from __future__ import annotations

import statistics
from typing import Any

from localq.bench.conditions import power
from localq.bench.models import measure
from localq.bench.models.plan import GENERATE, REPETITIONS, BenchPlan, BenchTest
from localq.bench.models.report import OURS
from localq.bench.quality.evaluation import SpeedTest
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, free_memory
from localq.errors import LocalqError

CASE = BenchTest(0, GENERATE, 0)


def speed_test() -> SpeedTest:
    """Return the test of `localq eval --speed`: one reply of `CASE`."""
    return SpeedTest(CASE.generate, CASE.positions, measure_speed)


def measure_speed(model: LoadedModel, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Measure median, lowest and highest rate of a reply, and the device bytes of the ledger.

    Correctness first: on a GPU the captured graph and the eager step must give the same tokens (exit 1).
    """
    eager = None
    if model.device.type == "cuda":
        eager = measure.greedy_ids(Engine(model, use_graphs=False), 0)
        free_memory()
    engine = Engine(model)
    if eager is not None and eager != measure.greedy_ids(engine, 0):
        why = "the CUDA graph and eager execution produce different tokens"
        raise LocalqError("eval", why, "Report this as a bug.")
    plan = BenchPlan((CASE,), repetitions)
    meter, limits = power.meter(model.device), power.throttle(model.device)
    subjects: dict[str, measure.Subject] = {OURS: measure.EngineSubject(engine, plan.seed)}
    (found,) = measure.measure(subjects, plan, meter, limits, lambda name, case: None)[OURS]
    return {
        "test": CASE.name,
        "tok_per_s": round(statistics.median(found.rates), 2),
        "tok_per_s_min": round(min(found.rates), 2),
        "tok_per_s_max": round(max(found.rates), 2),
        "repetitions": repetitions,
        "peak_bytes": sum(engine.ledger().values()),
    }
