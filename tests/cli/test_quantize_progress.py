"""How long a conversion still takes, at a terminal and in a log."""

from __future__ import annotations

import pytest

from localq.cli import progress
from localq.wording import DOWNLOADING


def test_the_rest_is_told_at_the_pace_of_its_own_kind() -> None:
    now = 0.0
    remaining = progress.Remaining(lambda: now)
    assert remaining.seconds("catching up", 0, 1000) is None
    now = 1.0
    assert remaining.seconds("catching up", 300, 1000) == pytest.approx(700 / 300)
    now = 11.0
    assert remaining.seconds("quantizing", 310, 1000) is None  # another kind: another pace
    now = 12.0
    assert remaining.seconds("quantizing", 315, 1000) is None  # too little to tell
    now = 31.0
    assert remaining.seconds("quantizing", 360, 1000) == pytest.approx(640 * 20 / 50)
    assert [progress.time_left(each) for each in (None, 0.2, 89, 91, 5000, 9000)] == [
        "", "about 1 s left", "about 89 s left", "about 2 min left", "about 83 min left", "about 2.5 h left"
    ]  # fmt: skip


def test_what_is_waited_for_counts_to_the_work() -> None:
    now = 0.0
    remaining = progress.Remaining(lambda: now)
    assert remaining.seconds("quantizing", 0, 1000) is None
    now = 30.0
    assert remaining.seconds(f"{DOWNLOADING} a file", 100, 1000) == pytest.approx(270)
    now = 50.0
    assert remaining.seconds("quantizing", 100, 1000) == pytest.approx(450)


def test_a_log_gets_a_line_now_and_then(capsys) -> None:
    now = 0.0
    update = progress._lines(lambda: now)
    for step in range(5):
        now = step * 25.0
        update("quantizing", step * 100, 1000)
    assert capsys.readouterr().err == "quantizing: 30%, about 3 min left\n"
    with progress.quantize_bar(quiet=True) as nothing:
        assert nothing is None
