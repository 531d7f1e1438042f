"""Small runs of the campaigns and of the measurement of `localq serve`, with a scripted engine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_localq import COMMAND, write_model
from tests.support.server.spawned_server import Holdings
from tests.tools import serve_campaign, serve_overhead


def test_a_campaign_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(text="one two ", repeat=20, step=4, step_s=0.001, context=4096).write(tmp_path / "script.json")
    folder = write_model(tmp_path / "tiny")
    arguments = ["--disconnects", "30", "--bad", "100", "--soak", "1s"]
    assert serve_campaign.run(arguments, (*COMMAND, str(script)), str(folder)) == 0, capsys.readouterr().out
    assert "0 wrong" in capsys.readouterr().out


def test_a_campaign_sees_what_a_process_holds_more() -> None:
    findings = serve_campaign.Findings()
    before = Holdings(100_000_000, 20, 8)
    findings.compare(before, Holdings(100_900_000, 21, 12), 1e6)
    assert findings.wrong == []
    findings.compare(before, Holdings(102_000_000, 40, 30), 1e6)
    assert len(findings.wrong) == 3


def test_the_measurement_counts_every_token() -> None:
    begun = time.perf_counter()
    without, through = serve_overhead.measure(runs=2, tokens=40)
    took = time.perf_counter() - begun
    assert len(without) == len(through) == 2
    for each in (*without, *through):
        assert 10 < each.rate < 520  # at most a token in 2 ms
        assert 0 < each.first_s < took
    assert json.dumps(vars(without[0]))
