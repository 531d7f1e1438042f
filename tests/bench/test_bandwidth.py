"""The read bandwidth, asked of a process of its own: a number, or nothing whatever goes wrong there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from localq.bench import bandwidth
from localq.planner import card as planner_card


def answering(monkeypatch, code: int, out: str) -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command, **options):
        asked.append(command)
        if out == "never":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, code, out, "")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_a_number_is_taken(monkeypatch):
    asked = answering(monkeypatch, 0, '{"read_bytes_per_s": 4.42e12}')
    assert planner_card.measure_bandwidth() == 4.42e12
    assert asked == [[sys.executable, "-P", "-m", "localq.bench.bandwidth"]]


@pytest.mark.parametrize(("code", "out"), [
    (7, ""), (1, '{"read_bytes_per_s": 1e12}'), (0, ""), (0, "[1]"), (0, "{}"), (0, '{"read_bytes_per_s": "fast"}'),
    (0, '{"read_bytes_per_s": 0}'), (0, '{"read_bytes_per_s": -1.0}'), (0, "never"),
])  # fmt: skip
def test_anything_else_is_nothing(monkeypatch, code, out):
    answering(monkeypatch, code, out)
    assert planner_card.measure_bandwidth() is None


def test_without_a_gpu_the_process_says_so(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (bandwidth.main(), capsys.readouterr().out) == (7, "")
