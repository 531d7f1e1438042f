"""How long the clocks were held down: from NVML's counters to what a row says."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from localq.bench.conditions.power import Throttle, summary
from localq.bench.models.plan import BenchTest
from localq.bench.models.report import OURS, BenchReport, BenchRow, write

TG = BenchTest(prompt=0, generate=64, depth=0)


class Nvml:
    """Counters that run at a share of the time; heat is not counted on this card."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1

    def __init__(self, share: float) -> None:
        self._share, self.seconds = share, 3.0

    def nvmlDeviceGetViolationStatus(self, card: object, policy: int) -> SimpleNamespace:
        if policy == self.NVML_PERF_POLICY_THERMAL:
            raise self.NVMLError
        return SimpleNamespace(violationTime=int(7e9 + self._share * self.seconds * 1e9))


def test_the_share_of_the_time_is_what_the_counter_says(monkeypatch):
    nvml = Nvml(0.5)
    monkeypatch.setattr("localq.bench.conditions.power.time", SimpleNamespace(perf_counter=lambda: nvml.seconds))
    limits = Throttle(nvml, None)
    limits.start()
    nvml.seconds += 0.25
    assert limits.stop() == {"power": pytest.approx(0.5)}


def test_nothing_is_told_where_nothing_is_counted():
    limits = Throttle(None, None)
    limits.start()
    assert limits.stop() == {}
    assert summary({}) == summary({"power": 0.004, "heat": 0.0}) == ""


def test_a_report_says_which_rows_ran_with_lowered_clocks():
    slowed = BenchRow(OURS, "nf4", TG, (80.0,), 80.0, held_down={"power": 0.625, "heat": 0.0})
    other = BenchRow("other", "nf4", TG, (1.0,), 1.0)
    report = BenchReport("m", (slowed, other), TG, {}, roof_bytes_per_s=1e12)
    out = io.StringIO()
    body = write(report, "table", out, io.StringIO())
    assert f"throttled by the driver (share of time): localq {TG.name} power 62%\n" in out.getvalue()
    assert [row["held_down_for_power"] for row in body["rows"]] == [0.625, None]
    assert body["rows"][0]["held_down_for_heat"] == 0.0
