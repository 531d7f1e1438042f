"""How far a transfer is, in words: rate, time left, what was here, and what stands still; with a clock of its own."""

from __future__ import annotations

import pytest

from localq.chat.terminal.transfer_rate import ResumedBytes, TransferRate
from localq.tui.jobs.thread_messages import Fetching, LoadingStage
from localq.tui.models.transfer_lines import TransferLines, bar, duration

MB = 10**6


def test_rate_and_time_left_are_of_what_comes_in():
    lines = TransferLines()
    for second in range(4):
        lines.update(Fetching("f, 1 of 90 MB", (30 + 2 * second) * MB, 90 * MB, here=30 * MB), 100.0 + second)
    told = lines.lines(103.0)
    assert told.stage == "Downloading f, 1 of 90 MB"
    assert told.share == pytest.approx(0.4)
    assert told.detail == "36.0 MB of 90.0 MB, 2.0 MB/s, 0:27 left\n30.0 MB of 90.0 MB were already on disk"


def test_what_stands_still_is_said_to():
    lines = TransferLines()
    lines.update(Fetching("f", 1 * MB, 9 * MB), 0.0)
    lines.update(Fetching("f", 2 * MB, 9 * MB), 1.0)
    assert "left" in lines.lines(3.5).detail
    told = lines.lines(8.0).detail
    assert told == "2.0 MB of 9.0 MB, stalled for 7 s (will retry after 30 s)"
    lines.update(Fetching("f", 3 * MB, 9 * MB), 9.0)
    assert "kB/s" in lines.lines(9.0).detail


def test_what_is_not_counted_and_what_is_loaded():
    lines = TransferLines()
    assert lines.lines(0.0).stage == "Reading files"
    lines.update(Fetching("checking model.safetensors", 0, 0), 0.0)
    assert lines.lines(60.0) == type(lines.lines(0.0))("Checking model.safetensors")
    lines.update(LoadingStage("loading weights", 1 * MB, 4 * MB), 61.0)
    told = lines.lines(90.0)
    assert (told.stage, told.share, told.detail) == ("Loading: loading weights", 0.25, "1.0 MB of 4.0 MB")


def test_bars_and_durations():
    assert bar(None).plain == ""
    assert bar(0.5, 4).plain == "━━──  50%"
    assert [duration(seconds) for seconds in (-1, 7.4, 750, 3723)] == ["0:00", "0:07", "12:30", "1:02:03"]


def test_what_leaps_was_here_and_a_file_that_begins_again_was_not():
    leaps = ResumedBytes()
    assert [leaps.update(done, 90 * MB) for done in (0, 30 * MB, 30 * MB + 1000, 31 * MB)] == [0, *[30 * MB] * 3]
    assert leaps.update(1 * MB, 90 * MB) == 0
    assert leaps.update(0, 50 * MB) == 0


def test_a_rate_forgets_what_is_long_ago():
    rate = TransferRate()
    assert rate.bytes_per_s(0.0) is None
    for second in range(60):
        rate.update(float(second), min(second, 30) * MB + max(0, second - 30) * 3 * MB)
    assert rate.bytes_per_s(59.0) == pytest.approx(3 * MB)
    assert rate.remaining_s(59.0, 30 * MB) == pytest.approx(10.0)
    assert rate.bytes_per_s(70.0) is None
