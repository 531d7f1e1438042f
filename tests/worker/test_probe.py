"""Asking a driver that may be broken: an answer within 5 s, whatever it does."""

from __future__ import annotations

import sys
import time

import pytest

from localq import driver, gpus
from localq.driver import Driver
from localq.gpus import NvmlReport
from localq.worker import probe

WORKING = Driver(present=True, cuda_version=(13, 0))
LOST = NvmlReport("580.65.06", unavailable=("GPU 0: GPU is lost",))


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('print(\'{"lost": ""}\')', ""),
        ('print(\'{"lost": "it finds no GPU"}\')', "it finds no GPU"),
        ("import os; os.abort()", "the driver query failed (signal SIGABRT)"),
        ("raise SystemExit(3)", "the driver query failed (exit code 3)"),
        ("print('[1]')", "the driver query failed (exit code 0)"),
    ],
)
def test_what_the_driver_answers(code, why):
    assert probe.why_lost(command=python(code)) == why


def test_a_driver_that_does_not_answer():
    started = time.monotonic()
    assert probe.why_lost(0.3, python("import time; time.sleep(60)")) == "the driver did not respond within 0.3 s"
    assert time.monotonic() - started < 30
    assert probe.SECONDS + probe.REAP_S + 2.0 < 5  # and the end of the engine process, at most


@pytest.mark.parametrize(
    ("found", "told", "why"),
    [
        (Driver(present=False), NvmlReport(), "the driver is no longer loaded"),
        (Driver(present=True, why_not="it finds no GPU"), NvmlReport(), "it finds no GPU"),
        (WORKING, LOST, "GPU 0: GPU is lost"),
        (WORKING, NvmlReport(unavailable=("GPU 0 memory: Not Supported",)), ""),
        (WORKING, NvmlReport(), ""),
    ],
)
def test_what_the_driver_and_nvml_say(monkeypatch, found, told, why):
    monkeypatch.setattr(driver, "probe_driver", lambda: found)
    monkeypatch.setattr(gpus, "probe", lambda: told)
    assert probe.check_here() == why


def test_the_real_question_is_answered_in_time():
    started = time.monotonic()
    assert probe.why_lost(60.0) == probe.check_here()
    assert time.monotonic() - started < 60
