"""The report on the instruments: its bounds are bounds, and all of it but the GPU runs over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localq.errors import LocalqError
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.tui.instruments import instrument_facts
from tests.support.tui.instruments_lab import CPU, GPU, PROFILE, TimedClient, Watch, chat_app
from tests.tools.tui_report import LEAST_TOKENS, Arm, Outcome, main


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    for name in ("config", "data", "cache"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.setattr(instrument_facts.InstrumentFacts.__init__, "__defaults__", (lambda: 0.0, Watch()))


def report(client: TimedClient, tmp_path: Path, profile: Callable[[], dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    def made(settings: Settings) -> LocalqApp:
        app = chat_app(client, settings, profile)
        client.shown = lambda: app.chat.instruments.is_visible
        return app

    code = main([str(tmp_path / "out"), "--rounds", "2"], made)
    return code, json.loads((tmp_path / "out" / "tui_report.json").read_text())


def test_a_gpu_on_which_instruments_cost_nothing(tmp_path, capsys):
    code, body = report(TimedClient(GPU), tmp_path, lambda: PROFILE)
    assert (code, body["ok"], body["judged"], body["failures"]) == (0, True, True, [])
    assert body["ratio"] == 1.0
    assert body["without"]["rates"] == body["shown"]["rates"] == [500.0, 500.0]
    assert body["profile"] == PROFILE
    assert body["read_bytes"] == 9_000_000_000 + 1_025_000_000
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[:4]] == ["without", "with", "without", "with"]
    assert json.loads(said.splitlines()[-1]) == body
    assert "Decode" in (tmp_path / "out" / "instruments.svg").read_text()


def test_what_instruments_cost_is_seen(tmp_path):
    code, body = report(TimedClient(GPU, cost=0.02), tmp_path, lambda: PROFILE)
    assert (code, body["ratio"]) == (1, 0.98)
    assert body["failures"] == ["with instruments 0.9800 of the speed without, at least 0.99 is asked for"]


def test_without_a_profile_the_report_fails(tmp_path):
    def broken() -> dict[str, Any]:
        raise LocalqError("profile", "a context of 8 has no room for 20 steps")

    code, body = report(TimedClient(GPU), tmp_path, broken)
    assert code == 1
    assert "a context of 8 has no room for 20 steps" in body["failures"][0]


def test_a_cpu_is_measured_and_not_judged(tmp_path, capsys):
    code, body = report(TimedClient(CPU, cost=0.5), tmp_path, lambda: PROFILE)
    assert (code, body["judged"], body["ratio"], body["profile"]) == (0, False, 0.5, None)
    assert "no profile: the CPU's step is not timed" in capsys.readouterr().out


# ---- bounds


def outcome(without: float = 100.0, shown: float = 100.0, sum_us: float = 100.0, tokens: int = 1000) -> Outcome:
    arms = [Arm([rate], tokens, tokens / rate) for rate in (without, shown)]
    return Outcome("cuda", "a card", *arms, profile={"sum_us": sum_us, "step_us": 100.0, "rows": []})


@pytest.mark.parametrize(("found", "failures"), [
    (outcome(), 0), (outcome(shown=99.0), 0), (outcome(shown=98.9), 1), (outcome(shown=200.0), 0),
    (outcome(sum_us=95.1), 0), (outcome(sum_us=94.9), 1), (outcome(sum_us=104.9), 0), (outcome(sum_us=105.1), 1),
    (outcome(tokens=LEAST_TOKENS), 0), (outcome(tokens=LEAST_TOKENS - 1), 1), (outcome(0.001, 0.0005, 1), 2),
])  # fmt: skip
def test_bounds(found, failures):
    assert len(found.failures()) == failures
    assert replace(found, device="cpu").failures() == []
