"""The length of drafts: it follows acceptance and cost, falls to 0, and comes back."""

from __future__ import annotations

import pytest

from localq.drafts import ROWS
from localq.engine.draft.drafter import Drafter
from localq.engine.draft.policy import Acceptance, PassTimes, best_draft, kind_of


def times_of(**ratios: float) -> PassTimes:
    times = PassTimes()
    for rows, ratio in {"r1": 1.0, **ratios}.items():
        times.record(int(rows[1:]), ratio)
    return times


CHEAP = times_of(r2=1.05, r4=1.2, r8=1.5)
DEAR = times_of(r2=1.9, r4=3.6, r8=7.0)


def test_certain_tokens_fill_the_largest_pass_and_unlikely_ones_none():
    assert best_draft([0.99] * 7, CHEAP)[0] == 7
    assert best_draft([0.05] * 7, CHEAP)[0] == 0
    assert best_draft([], CHEAP)[0] == 0


def test_where_rows_cost_as_much_as_steps_nothing_is_drafted():
    assert best_draft([0.8] * 7, DEAR)[0] == 0


def test_in_between_a_pass_is_filled_as_far_as_it_pays():
    assert best_draft([0.5] * 7, times_of(r2=1.1, r4=1.4, r8=2.5))[0] in (1, 3)
    assert best_draft([0.9, 0.9], CHEAP)[0] == 2  # two forced tokens take a pass of four rows


def test_acceptance_follows_what_happens():
    acceptance, kind = Acceptance(), kind_of("lookup", 5)
    first = acceptance.of(kind)
    for _ in range(40):
        acceptance.record(kind, accepted=False)
    assert acceptance.of(kind) < 0.1 < first
    for _ in range(60):
        acceptance.record(kind, accepted=True)
    assert acceptance.of(kind) > 0.85
    assert acceptance.of(kind_of("lookup", 40)) > acceptance.of(kind_of("lookup", 3))


def test_times_are_relative_until_they_are_measured_and_never_fall_with_rows():
    times = PassTimes()
    assert [times.ratio(rows) for rows in ROWS] == sorted(times.ratio(rows) for rows in ROWS)
    times.record(1, 0.01)
    times.record(2, 0.018)
    assert times.ratio(2) == pytest.approx(1.8)
    assert times.ratio(4) >= times.ratio(2)


def test_one_pause_does_not_end_drafting_and_old_times_are_forgotten():
    times = times_of(r2=1.1)
    times.record(2, 1000.0)
    assert times.ratio(2) < 2
    for _ in range(30):
        times.record(2, 3.0)
    assert times.ratio(2) > 2.5
    for _ in range(2000):
        times.record(1, 1.0)
    assert times.ratio(2) < 1.4


def copying(drafter: Drafter, tokens: list[int]) -> int:
    """Tokens that drafts save while the reply is `tokens`."""
    saved, place = 0, 0
    while place < len(tokens):
        draft = drafter.draft(min(7, len(tokens) - place - 1))
        accepted = 0
        while accepted < len(draft) and draft.ids[accepted] == tokens[place + accepted]:
            accepted += 1
        if draft:
            drafter.record(draft, accepted)
        for count, token in enumerate(tokens[place : place + accepted + 1]):
            drafter.push(token, drafted=count < len(draft))
        saved += accepted
        place += accepted + 1
    return saved


def test_a_copy_is_drafted_in_long_blocks_and_prose_is_not():
    text = list(range(1000, 1300))
    drafter = Drafter()
    drafter.times = CHEAP
    drafter.begin([*text, 1, 2])
    assert copying(drafter, text) > 0.8 * len(text)
    drafter.begin([*text, 1, 2])
    assert copying(drafter, list(range(5000, 5300))) == 0
    assert not drafter.engages()


def test_matches_that_mislead_are_left_alone_until_they_lead_again():
    """Every third word is a new one: matches of three tokens that never go on, then a text that does."""
    drafter = Drafter()
    drafter.times = times_of(r2=1.3, r4=1.8, r8=2.8)
    misleading = [token for count in range(400) for token in (1, 2, 3, 1000 + count)]
    drafter.begin(misleading[:40])
    for token in misleading[40:]:
        drafter.push(token)
    assert not drafter.draft(7) or drafter.draft(7).ids[0] in (1, 2, 3)
    drafter.push(1)
    drafter.push(2)
    drafter.push(3)
    assert not drafter.draft(7)
    for _ in range(300):
        for token in (7, 8, 9, 10, 11, 12):
            drafter.push(token)
    assert len(drafter.draft(7)) == 7


def test_forced_tokens_come_first_and_a_limit_is_kept():
    drafter = Drafter()
    drafter.times = CHEAP
    drafter.begin([1, 2, 3, 4, 5, 1, 2, 3], most=3)
    found = drafter.draft(7, forced=[70, 71, 72, 73, 74], masked=True)
    assert (found.ids, found.source) == ((70, 71, 72), "grammar")
    assert drafter.draft(7).source == "lookup"
    assert not drafter.draft(0)


def test_replies_under_a_mask_are_held_for_drafts_less_and_less():
    drafter = Drafter()
    drafter.begin([1, 2, 3])
    held = 0
    for _ in range(160):
        held += drafter.expects_forced()
        drafter.draft(7, masked=True)
    assert 16 <= held <= 16 + 160 // 16
    drafter.times = CHEAP
    drafter.draft(7, forced=[1, 2], masked=True)
    assert drafter.expects_forced()
