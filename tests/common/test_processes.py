"""Work with a limit of time: of the processor, not of the clock."""

from __future__ import annotations

import hashlib
import time

import pytest

from localq import processes


def test_work_that_waits_for_a_processor_is_not_refused():
    """Sleeping stands for a machine that is busy with other work."""
    assert processes.run_with_timeout(0.5, lambda: time.sleep(1.2) or "done") == "done"


def test_work_that_uses_more_than_its_time_is_refused():
    with pytest.raises(TimeoutError):  # the whole takes two seconds of a processor, and goes on in the background
        processes.run_with_timeout(0.1, lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 5_000_000))


def test_work_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(processes, "SLOWEST", 3)
    with pytest.raises(TimeoutError):
        processes.run_with_timeout(0.1, lambda: time.sleep(60))


def test_errors_and_results_are_those_of_the_work():
    assert processes.run_with_timeout(10, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        processes.run_with_timeout(10, lambda: 1 // 0)
