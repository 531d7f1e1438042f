"""Processes that are killed, interrupted, or many: `tests/support/hub_*.py`, short enough for every run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
LONGEST_S = 900  # of a campaign, beside much other work; alone it takes a tenth
pytestmark = pytest.mark.timeout(LONGEST_S + 20)


def campaign(name: str, *arguments: str) -> dict[str, Any]:
    """The last line of a campaign that found nothing wrong."""
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    result = subprocess.run(
        [sys.executable, "-m", f"tests.tools.{name}", *arguments],
        capture_output=True, text=True, check=False, timeout=LONGEST_S, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert report["wrong"] == []
    return report


@pytest.mark.slow
def test_200_kills_leave_nothing_wrong_and_cost_at_most_16_mib_each():
    report = campaign("hub_kills", "--kills", "200", "--mib", "17", "1", "1")
    assert report["kills"] == 200
    assert report["most_again_bytes"] <= 16 * 2**20


def test_eight_processes_fetch_each_file_once():
    campaign("hub_processes", "parallel", "--rounds", "3")


def test_eight_processes_without_locks_spoil_nothing():
    campaign("hub_processes", "parallel", "--rounds", "3", "--no-locks")


def test_signals_end_a_pull_at_once_with_their_code():
    report = campaign("hub_processes", "signals", "--rounds", "16", "--most-s", "30")  # 1 s where nothing else runs
    assert sum(report["codes"].values()) == 16  # how many came in time (130, 143) is a matter of the machine's speed


@pytest.mark.parametrize(("name", "code"), [("KeyboardInterrupt", 130), ("SystemExit", 143)])
def test_a_stop_that_comes_while_an_object_is_destroyed_is_not_lost(name, code):
    """As in a generator of the HTTP library: Python prints such an exception and goes on."""
    program = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever was inherited: shells start jobs without it
from localq import cli
from localq.cli import command_line
class Destroyed:
    def __del__(self):
        raise {name}
def work(arguments, **options):
    Destroyed()
    time.sleep(300)
command_line.app = work
cli.main()
"""
    result = subprocess.run(  # it ends long before its work would
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert (result.returncode, result.stderr) == (code, "")
