"""`bench --quantize`: one layer of a catalogued shape, its stages timed, the model's hours from them."""

from __future__ import annotations

import io
import json

import pytest
import torch

from localq import kernels
from localq.bench.models import quantizing
from localq.bench.models.quantizing import Method, QuantizingRequest, Stopwatch
from localq.quantize.settings import Effort, Tuning

QUICK = Method(Effort(beam=2, columns=64, steps=1), Tuning(), 2, 32)
BEST = Method(Effort(beam=3, columns=64, rounds=2, steps=1), Tuning(6, 1), 3, 32)
STAGES = ["reading", "statistics", "targets", "search", "codebooks", "forward"]


@pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")
def test_a_layer_of_smollm2_on_the_cpu(monkeypatch):
    monkeypatch.setattr(quantizing, "TIMED_STEPS", 2)
    out = io.StringIO()
    found = quantizing.run(out, QuantizingRequest("smollm2-135m", "cpu", None, 3), {"quick": QUICK, "best": BEST})
    assert json.loads(out.getvalue().splitlines()[-1]) == found
    quick, best = found["ways"]["quick"], found["ways"]["best"]
    assert (found["schema"], found["layers"], found["model"]) == (1, 30, "smollm2-135m")
    assert sorted(quick["seconds"]) == sorted(STAGES)
    assert sorted(best["seconds"]) == sorted([*STAGES, "fine-tuning"])
    assert (best["tuning_steps"], best["tuning_steps_timed"]) == (6, 2)
    for each in (quick, best):
        assert min(each["seconds"].values()) > 0
        assert each["layer_s"] == pytest.approx(sum(each["seconds"].values()), abs=0.02)
        assert each["hours"] == pytest.approx(each["layer_s"] * 30 / 3600, abs=0.001)
        assert (each["reserved_bytes"], each["weights_on_host"]) == (None, False)
        assert each["counted_bytes"] > 8 * 3_000_000
    assert "smollm2-135m, best: 3 windows of 32 tokens, beam width 3" in out.getvalue()


def test_steps_that_were_not_timed_count(monkeypatch):
    watch = Stopwatch(torch.device("cpu"))
    watch.seconds.update({"search": 4.0, "fine-tuning": 2.0})
    way = Method(Effort(), Tuning(steps=3 * quantizing.TIMED_STEPS), 1, 8)
    counted = quantizing.memory.MemoryCount({"a pass": 5}, 2)
    found = quantizing._facts(watch, way, counted, False, torch.device("cpu"), 80)
    assert (found["layer_s"], found["hours"]) == (10.0, pytest.approx(800 / 3600, abs=0.001))


def test_a_stopwatch_adds_up_what_comes_again(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr(quantizing.time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch(torch.device("cpu"))
    for stage in ("search", "codebooks", "search", ""):
        watch(stage)
    assert watch.seconds == {"search": 5.0, "codebooks": 2.0}
