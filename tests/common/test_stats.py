"""The plain forms of what the engine measures."""

from __future__ import annotations

import json

from localq.stats import Operation, StepProfile


def test_a_step_profile_says_bytes_over_time_and_its_sum():
    rows = (Operation("qkv", 2, 4.0, 8_000), Operation("sample", 1, 0.5, 0), Operation("embed", 1, 0.0, 10))
    profile = StepProfile(rows, step_us=4.6, host_gap_us=0.3, position=128, timer="cupti")
    assert profile.sum_us == 4.5
    assert rows[0].gb_per_s == 2.0  # 8 kB in 4 us
    assert rows[2].gb_per_s == 0.0
    plain = json.loads(json.dumps(profile.to_dict()))
    assert plain["rows"][0] == {"kernel": "qkv", "calls": 2, "us": 4.0, "bytes": 8000, "gb_per_s": 2.0}
    assert (plain["sum_us"], plain["step_us"], plain["host_gap_us"]) == (4.5, 4.6, 0.3)
    assert (plain["position"], plain["timer"]) == (128, "cupti")
