"""What is measured and how it is written: cases, the arithmetic of rows, every output format, the straight line."""

from __future__ import annotations

import csv
import io
import json
import time

import pytest

from localq.bench.conditions.power import CounterMeter, NoMeter, PowerMeter, Throttle, integrate
from localq.bench.models import plan as bench_plan
from localq.bench.models.extrapolate import PAIRS, extrapolate, line
from localq.bench.models.measure import Measurement, Run, measure
from localq.bench.models.plan import BenchTest
from localq.bench.models.report import BASELINE, FORMATS, OURS, BenchReport, BenchRow, write
from localq.errors import ExitCode, LocalqError

TG, PP = BenchTest(0, 128, 0), BenchTest(512, 0, 4096)


def test_lists_make_every_test_at_every_depth():
    plan = bench_plan.make("512,2k", "128", "0,4096", repetitions=3)
    assert [case.name for case in plan.cases] == [
        "pp512", "pp2048", "tg128", "pp512 @ d4096", "pp2048 @ d4096", "tg128 @ d4096",
    ]  # fmt: skip
    assert plan.positions == 4096 + 2048 + 1
    assert plan.ctx == 6208  # 97 * 64
    assert plan.headline == BenchTest(0, 128, 0)
    assert bench_plan.make("0", "16", "0").cases == (BenchTest(0, 16, 0),)


@pytest.mark.parametrize(
    ("words", "named"), [(("x", "1", "0"), "-p"), (("0", "0", "0"), "nothing"), (("0", "1", "0"), "tg1"),
                         (("5", "8", "-1"), "-d")],
)  # fmt: skip
def test_wrong_lists_are_usage_errors(words, named):
    with pytest.raises(LocalqError, match=named) as caught:
        bench_plan.make(*words)
    assert caught.value.exit_code == ExitCode.USAGE


def test_whom_to_measure_besides(monkeypatch):
    assert bench_plan.rivals([], ["transformers"]) == ("transformers",)
    assert bench_plan.rivals(["none"], ["transformers"]) == ()
    monkeypatch.setattr(bench_plan.importlib.util, "find_spec", lambda name: name == "transformers" or None)
    assert bench_plan.rivals(["transformers,none", "transformers"], []) == ("transformers",)
    for words, named in ((["ollama"], "unknown engine 'ollama'"), (["transformers,bitsandbytes"], "not installed")):
        with pytest.raises(LocalqError, match=named) as caught:
            bench_plan.rivals(words, [])
        assert caught.value.exit_code == ExitCode.USAGE


def test_rates_and_energy_by_hand():
    measured = Measurement(TG, (Run(1.0, 0.25), Run(2.0, 0.5), Run(4.0, 0.125)), joules=96.0)
    assert measured.rates == [128.0, 64.0, 32.0]
    assert measured.seconds_per_token == 2.0 / 128
    assert measured.first_token_s == 0.25
    assert measured.joules_per_token == 96.0 / 384
    assert integrate([(0.0, 100.0), (0.5, 200.0), (1.5, 200.0)]) == 75.0 + 200.0


class Card:
    """NVML's two ways to tell energy."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.millijoules = iter([1_000, 3_500])

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        return next(self.millijoules)

    def refuse(self, handle: object) -> int:
        raise self.NVMLError

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return 40_000


def test_meters_read_the_counter_or_integrate_the_power():
    counter = CounterMeter(Card(), None)
    counter.start()
    assert counter.stop() == 2.5
    power = PowerMeter(Card(), None)
    started = time.perf_counter()
    power.start()
    time.sleep(0.2)
    joules = power.stop()
    assert 40 * 0.1 < joules <= 40 * (time.perf_counter() - started)  # the thread that samples may begin late


def test_energy_that_is_not_told_is_unknown_and_never_nothing():
    still, gone = Card(), Card()
    still.millijoules = iter([1_000, 1_000])
    gone.nvmlDeviceGetPowerUsage = gone.refuse

    def told_once(handle: object, answers: list[int] = [7]) -> int:  # noqa: B006  # gives its one answer
        return answers.pop() if answers else gone.refuse(handle)

    gone.nvmlDeviceGetTotalEnergyConsumption = told_once
    for meter in (CounterMeter(still, None), CounterMeter(gone, None), PowerMeter(gone, None), NoMeter()):
        meter.start()
        assert meter.stop() is None
    assert Measurement(TG, (Run(1.0),)).joules_per_token is None


class Metered:
    """A subject whose runs take a second; a meter that tells 12 J."""

    def __init__(self, metered: bool = True) -> None:
        self.is_metered = lambda case: metered

    def can(self, case: BenchTest) -> bool:
        return True

    def run(self, case: BenchTest, repetition: int) -> Run:
        return Run(1.0)

    def start(self) -> None:
        pass

    def stop(self) -> float:
        return 12.0


def test_energy_is_told_only_where_it_is_that_of_the_tokens():
    plan = bench_plan.make("0", "4", "0", repetitions=3)

    def joules(**subjects: Metered) -> list[float | None]:
        measured = measure(subjects, plan, Metered(), Throttle(None, None), lambda name, case: None)
        return [each.joules_per_token for cases in measured.values() for each in cases]

    assert joules(ours=Metered()) == [1.0]
    assert joules(theirs=Metered(False)) == [None]
    assert joules(ours=Metered(), theirs=Metered()) == [None, None]


def test_the_line_through_two_cuts():
    assert line(3.0, 5.0, few=2, more=4, layers=80) == 3.0 + 78.0
    asked = []

    def timed(layers: int) -> dict[str, list[Measurement]]:
        asked.append(layers)
        if layers > 4:
            raise LocalqError("model", "too large", "", ExitCode.DOES_NOT_FIT)
        return {"engine": [Measurement(TG, (Run(1.0 + 0.5 * layers),))]}

    result, pair = extrapolate(80, timed)
    assert asked == [6, 2, 4]
    assert pair == PAIRS[1]
    assert result["engine"][0].runs[0].seconds == pytest.approx(41.0)
    assert result["engine"][0].extrapolated


def test_other_failures_are_not_taken_for_a_lack_of_memory():
    def timed(layers: int) -> dict[str, list[Measurement]]:
        raise LocalqError("model", "damaged", "", ExitCode.BAD_FILE)

    with pytest.raises(LocalqError, match="damaged"):
        extrapolate(80, timed)


def report() -> BenchReport:
    ours = BenchRow(OURS, "nf4", TG, (300.0, 320.0), 310.0, 0.01, 4_000_000, 0.4, 0.5, 2**30, None, 3.25)
    prefill = BenchRow(OURS, "nf4", PP, (9000.0,), 9000.0)
    dense = BenchRow(BASELINE, "fp16", TG, (100.0,), 100.0, extrapolated=True)
    return BenchReport("a, \"quoted\" model", (ours, prefill, dense), TG, {"device": "CPU", "seed": 0}, 1e12,
                  32, {"eager": 32}, {"weights": 5}, {"weights": 6}, ("a note",))  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_parses_and_ends_with_the_whole_as_json(format):
    out, err = io.StringIO(), io.StringIO()
    body = write(report(), format, out, err)
    lines = out.getvalue().splitlines()
    assert json.loads(lines[-1]) == body
    assert body["schema"] == 1
    assert (body["speedup_over_fp16"], body["fp16_extrapolated"]) == (3.1, True)
    assert body["speedups"] == {"tg128": {BASELINE: 3.1}, "pp512 @ d4096": {}}
    assert body["rows"][0]["joules_per_token"] == 0.5
    said = lines[0] if format in ("table", "md") else err.getvalue()
    assert said.rstrip().endswith(", 3.10x the speed of fp16 in the same engine (100.0 tok/s, extrapolated)")
    if format == "json":
        assert len(lines) == 1
    if format == "jsonl":
        assert [json.loads(line)["test"] for line in lines[:-1]] == ["tg128", "pp512 @ d4096", "tg128"]
    if format == "csv":
        rows = list(csv.DictReader(lines[:-1]))
        assert [row["engine"] for row in rows] == [OURS, OURS, BASELINE]
        assert float(rows[0]["tok_per_s"]) == 310.0
        assert rows[1]["bytes_per_token"] == ""
    if format in ("table", "md"):
        assert "~3.10" in out.getvalue()  # over a row that is marked
        assert "localq fp16 (extrapolated)" in out.getvalue()
    if format == "md":
        table = [line for line in lines if line.startswith("|")]
        assert len({line.count("|") for line in table}) == 1
        assert len(table) == 2 + 3


@pytest.mark.parametrize("told", [None, 3 * 2**30])
def test_memory_as_predicted_and_as_taken(told):
    ours = BenchRow(OURS, "nf4", TG, (1.0,), 1.0, process_vram_bytes=told)
    ledger, predicted = {"weights": 2 * 2**30, "cuda_context": 2**30}, {"weights": 2 * 2**30, "cuda_context": 2**29}
    measured = BenchReport("m", (ours,), TG, {}, 1e12, ledger_bytes=ledger, predicted_bytes=predicted)
    line = "memory: predicted 2.50 GiB, used 3.00 GiB (+512 MiB, +20.0%)"
    assert measured.memory_line() == line
    out = io.StringIO()
    body = write(measured, "table", out, io.StringIO())
    assert line in out.getvalue().splitlines()
    assert (body["predicted_vram_bytes"], body["taken_vram_bytes"]) == (2.5 * 2**30, 3 * 2**30)
    assert report().memory_line() == ""
    assert report().to_dict()["taken_vram_bytes"] is None


def test_the_first_line_without_a_baseline_says_why():
    alone = BenchReport("m", (BenchRow(OURS, "bf16", TG, (10.0,), 10.0),), TG, {}, 1e12)
    assert "not quantized" in alone.first_line()
    assert alone.to_dict()["speedup_over_fp16"] is None
