"""The plain forms of what the engine measures."""

from __future__ import annotations

import json

from localq.stats import Operation, Stats, StepProfile
from localq.wording import draft_lines, stats_line


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


DRAFTED = Stats(
    "done", 10, generated_tokens=41, decode_s=1.0, context_used=51, context_size=100, decode_steps=16,
    drafted={"lookup": 24, "grammar": 6}, accepted={"lookup": 18, "grammar": 6}, drafted_at=(20, 10),
    accepted_at=(16, 8),
)  # fmt: skip


def test_drafts_are_told_by_source_and_position():
    assert DRAFTED.tokens_per_step == 2.5
    assert DRAFTED.steps_per_s == 16.0
    assert DRAFTED.acceptance == 0.8
    assert ", 40.0 tok/s, 2.5 tokens per step, first token" in stats_line(DRAFTED)
    assert draft_lines(DRAFTED) == [
        "drafts: accepted 18 of 24 tokens (found in the conversation), 6 of 6 tokens (forced by the grammar); "
        "2.50 tokens per step",
        "acceptance by draft position: 80% 80%",
    ]
    assert draft_lines(Stats()) == []
    assert "per step" not in stats_line(Stats(generated_tokens=41, decode_s=1.0, decode_steps=40))


def test_the_report_of_a_reply_has_units_and_survives_json():
    report = DRAFTED.report()
    assert report["drafted_tokens"] == {"lookup": 24, "grammar": 6}
    assert report["accepted_tokens_by_position"] == [16, 8]
    assert (report["tokens_per_s"], report["tokens_per_step"], report["decode_steps"]) == (40.0, 2.5, 16)
    assert "drafted" not in report
    assert Stats(**json.loads(json.dumps(DRAFTED.to_dict()))) == DRAFTED
