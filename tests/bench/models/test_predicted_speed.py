"""What a benchmark says of `localq fit`'s prediction: from the plan of the very load, and silent where it has none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq.bench.models import rows
from localq.bench.models.plan import BenchTest
from localq.bench.models.report import OURS, BenchReport, BenchRow
from localq.files import catalog
from localq.planner import placement
from localq.planner import plan as memory_plan
from localq.planner.speed import measurements
from tests.tools.results_tables import recorded_models

TG = BenchTest(0, 128, 0)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(rows, "device_name", lambda device: "NVIDIA H200")


def loaded(name: str, format: str, device: str = "cuda", head: str = "16", **changes) -> SimpleNamespace:
    plan = memory_plan.plan(
        catalog.find(name).arch, format, 141 * 2**30, wishes=placement.Wishes(4096, 16, "device", head)
    )
    return SimpleNamespace(device=torch.device(device), plan=replace(plan, **changes), format=format)


def test_it_is_what_fit_says_for_the_bandwidth_of_the_run():
    model = next(each for each in recorded_models() if each.name == "llama-3.1-8b@nf4")
    told = rows.predict_speed(loaded("llama-3.1-8b", "nf4"), TG, measurements.load().read_bytes_per_s)
    assert told == pytest.approx(model.tok_s, rel=0.10)
    deep = rows.predict_speed(loaded("llama-3.1-8b", "nf4"), BenchTest(0, 128, 30_000), 4.42e12)
    assert deep < 0.8 * told


def test_it_is_silent_where_fit_has_nothing():
    roof = measurements.load().read_bytes_per_s
    assert rows.predict_speed(loaded("llama-3.1-8b", "nf4", device="cpu"), TG, roof) is None
    assert rows.predict_speed(loaded("llama-3.1-8b", "nf4", arch=None), TG, roof) is None
    assert rows.predict_speed(loaded("llama-3.1-8b", "vptq"), TG, roof) is None  # its tables are not known here
    three = loaded("llama-3.1-8b", "vq2")
    parts = three.plan.ledger.components
    more = memory_plan.Ledger({**parts, "weights": parts["weights"] * 3 // 2})
    assert rows.predict_speed(three, TG, roof) is not None
    assert rows.predict_speed(loaded("llama-3.1-8b", "vq2", ledger=more), TG, roof) is None  # 3 bits


def test_the_report_sets_it_beside_what_was_measured():
    row = BenchRow(OURS, "nf4", TG, (498.0,), 498.0, predicted_tok_per_s=506.5)
    report = BenchReport("m", (row,), TG, {}, 4.42e12)
    assert report.speed_line() == "predicted by `localq fit`: 506.5 tok/s at tg128 (+1.7%)"
    assert report.to_dict()["rows"][0]["predicted_tok_per_s"] == 506.5
    assert BenchReport("m", (replace(row, predicted_tok_per_s=None),), TG, {}, 4.42e12).speed_line() == ""
