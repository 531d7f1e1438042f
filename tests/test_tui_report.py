"""The report on the instruments: its bounds are bounds, and all of it but the GPU runs over a scripted engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from instruments_lab import CPU, GPU, PROFILE, Watch
from scripted_client import CharTokenizer, ScriptedClient

from localq.chat import ChatSession
from localq.errors import LocalqError
from localq.settings import Settings
from localq.stats import Stats
from localq.tui import instrument_facts
from localq.tui.app import LocalqApp
from localq.tui.model import Model
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens

sys.path.insert(0, str(Path(__file__).parent))

from tui_report import LEAST_TOKENS, Arm, Outcome, main

TOKENS = 80


class TimedClient(ScriptedClient):
    """Says that it decodes at `tokens_per_s`, slower by `cost` while instruments are shown."""

    def __init__(self, loaded: Loaded, cost: float = 0.0) -> None:
        super().__init__(context_size=loaded.context_size)
        self.as_loaded, self.cost = loaded, cost
        self.shown: Callable[[], bool] = lambda: False

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        super().load(request, on_event)
        return self.as_loaded

    def generate(self, request: Generate) -> Iterator[Event]:
        rate = 500.0 * (1 - self.cost * self.shown())
        used = len(request.prompt)
        stats = Stats(prompt_tokens=used, context_used=used, context_size=self.context_size)
        yield Progress(request.id, stats)
        for count in range(1, TOKENS + 1):
            stats = replace(
                stats, phase="decode", generated_tokens=count, decode_s=(count - 1) / rate, context_used=used + count
            )
            yield Tokens(request.id, [ord("a")], stats)
        yield Done(request.id, "length", replace(stats, phase="done"))


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    for name in ("config", "data", "cache"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.setattr(instrument_facts.Facts.__init__, "__defaults__", (lambda: 0.0, Watch()))


def report(client: TimedClient, tmp_path: Path, profile: Callable[[], dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    def made(settings: Settings) -> LocalqApp:
        session = ChatSession(client, Load("", client.as_loaded.name), CharTokenizer())
        app = LocalqApp(settings, session=session)
        session.ensure_loaded()
        app.model = Model(session, session.ensure_loaded, lambda: None, profile)
        client.shown = lambda: app.chat.instruments.can_be_seen
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
