"""The clock of the stages of a start."""

from __future__ import annotations

from localq.worker.backend import StageClock


def test_a_stage_ends_where_the_next_begins():
    now = iter([0.0, 1.0, 4.0, 4.5, 9.0])
    clock = StageClock(lambda: next(now))
    clock.begin("opening the files")  # at 1 s: what was before belongs to no stage
    clock.begin("planning")
    clock.begin("planning")  # every report of progress names its stage
    clock.begin("loading weights")
    assert clock.stages() == {"opening the files": 3.0, "planning": 0.5, "loading weights": 4.5}


def test_a_stage_that_comes_back_adds_up():
    now = iter([0.0, 0.0, 1.0, 3.0, 7.0])
    clock = StageClock(lambda: next(now))
    for stage in ("a", "b", "a"):
        clock.begin(stage)
    assert clock.stages() == {"a": 5.0, "b": 2.0}
