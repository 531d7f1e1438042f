"""The profile of a step as bars, and the card as gauges: every text by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq.gpus import Reading
from localq.tui.gauge import BAD, FAIR, GOOD, MUTED
from localq.tui.instruments.card_line import CardLine
from localq.tui.instruments.instrument_facts import InstrumentFacts
from localq.tui.instruments.instrument_widget import figure
from localq.tui.instruments.kernel_bars import KernelBars, age, rows
from tests.support.tui.instruments_lab import CPU, GPU, PROFILE, READING, Clock, Watch, reply

pytestmark = pytest.mark.usefixtures("own_cache")


def facts_of(loaded=GPU, clock: Clock | None = None) -> InstrumentFacts:
    facts = InstrumentFacts(clock or Clock(), Watch())
    facts.load(loaded)
    return facts


def kernels(facts: InstrumentFacts, width: int = 36) -> list[str]:
    return [each.plain for each in KernelBars(facts, "kernels").lines(width)]


def card(facts: InstrumentFacts, width: int = 36) -> list[str]:
    return [each.plain for each in CardLine(facts, "card").lines(width)]


def test_figures_have_three_digits():
    assert [figure(value) for value in (0, 4.04, 38.16, 99.94, 99.96, 648.2, 1234)] == [
        "0.0", "4.0", "38.2", "99.9", "100", "648", "1234",
    ]  # fmt: skip


def test_a_step_to_the_letter():
    """Four operations of 6,000 us in all, 936 GB/s; 10 cells are the 4,000 us of the largest."""
    clock = Clock()
    facts = facts_of(clock=clock)
    facts.add_profile(PROFILE)
    clock.now += 12
    assert kernels(facts) == [
        "Decode step ── 6.1 ms, % of 936 GB/s",
        "qkv       ━━╸───────  1,000 µs   85%",  # 800 GB/s
        "attention ━─────────    500 µs   21%",
        "down      ━━━━━━━━━━  4,000 µs   96%",
        "head      ━─────────    500 µs   85%",
        "host gap 12.5 µs",
        "at 1,024 tokens, 12 s ago",
    ]


def test_what_the_shares_are_of_is_said_at_their_head_at_every_width():
    facts = facts_of()
    facts.add_profile(PROFILE)
    for width in range(31, 60):
        rows = kernels(facts, width)
        assert ", % of " in rows[0]
        assert "…" not in rows[0]
        assert ("936 GB/s" in rows[0]) != ("peak 936 GB/s" in rows[-2])
    assert kernels(facts, 33)[0] == "Decode step ─── 6.1 ms, % of peak"


def test_small_operations_share_a_row():
    small = [{"kernel": name, "calls": 1, "us": 40.0, "bytes": 1, "gb_per_s": 1.0} for name in ("embed", "sample")]
    shown = [row.plain for row in rows({**PROFILE, "rows": [*PROFILE["rows"], *small]}, 936.0, 36)]
    assert len(shown) == 5
    assert shown[-1].startswith("other ")
    assert shown[-1].rstrip().endswith("80 µs")


def test_the_share_of_the_bandwidth_is_coloured():
    down, attention = rows(PROFILE, 936.0, 60)[2], rows(PROFILE, 936.0, 60)[1]
    assert GOOD in {span.style for span in down.spans}
    assert MUTED in {span.style for span in attention.spans}
    assert BAD not in {span.style for span in attention.spans}  # low is no fault


def test_without_a_known_bandwidth_no_share_of_it():
    facts = facts_of(replace(GPU, device_name="A card of tomorrow"))
    facts.add_profile(PROFILE)
    assert kernels(facts)[1].rstrip() == "qkv       ━━╸───────  1,000 µs"
    assert kernels(facts)[-2] == "host gap 12.5 µs"


def test_nothing_is_said_where_nothing_is_known_and_why_a_profile_failed():
    assert kernels(facts_of(CPU)) == kernels(InstrumentFacts()) == []
    facts = facts_of()
    facts.add_profile_failure("profile: a context of 8 has no room for 20 steps")
    assert " ".join(kernels(facts)[1:]) == "profile: a context of 8 has no room for 20 steps"
    facts.add_profile(PROFILE)
    facts.add_profile_failure("the engine is busy")
    assert "profile failed: the engine is busy" in kernels(facts)


def test_until_a_step_is_profiled_its_place_names_the_key():
    facts = facts_of()
    assert kernels(facts) == ["Decode step ─── F5: time the kernels"]
    facts.asked = True
    assert kernels(facts) == ["Decode step ───── timing the kernels"]


def test_ages():
    assert [age(seconds) for seconds in (0.2, 12, 89, 90, 600)] == [
        "0 s ago", "12 s ago", "89 s ago", "2 min ago", "10 min ago",
    ]  # fmt: skip


# ---- when a profile is due


def test_a_profile_is_due_after_a_load_and_when_the_context_has_doubled():
    facts = facts_of()
    assert facts.profile_due
    facts.add_profile({**PROFILE, "position": 1000})
    assert not facts.profile_due
    facts.add(reply(10, used=1999))
    facts.end()
    assert not facts.profile_due
    facts.add(reply(10, used=2000))
    assert not facts.profile_due  # not while a reply runs
    facts.end()
    assert facts.profile_due
    facts.asked = True
    assert not facts.profile_due  # once


def test_growth_of_a_short_context_says_little():
    facts = facts_of()
    facts.add_profile({**PROFILE, "position": 10})
    facts.add(reply(10, used=511))
    facts.end()
    assert not facts.profile_due
    facts.add(reply(10, used=512))
    facts.end()
    assert facts.profile_due


def test_what_failed_three_times_is_tried_again_only_if_the_user_wants_it():
    facts = facts_of()
    for _ in range(3):
        assert facts.profile_due
        facts.add_profile_failure("no room")
    assert not facts.profile_due
    facts.wanted = True
    assert facts.profile_due
    facts.load(CPU)
    assert not facts.profile_due


# ---- the card


def test_a_card_to_the_letter():
    facts = facts_of()
    facts.add_reading(READING)
    assert card(facts) == [
        "GPU ─────────────────────── RTX 3090",
        "busy      ━━━━━━━━━━━╸           97%",
        "power     ━━━━━━━━━━──  285 of 350 W",
        "temp      ━━━━━━━╸────         64 °C",
        "clocks    1,695 MHz, memory 9,501",
        "limited by power",
    ]
    facts.add_reading(replace(READING, held_by=()))
    assert card(facts)[-1] == "clocks not limited"


def test_heat_and_power_are_coloured_by_how_near_their_limits_are():
    def styles(place: int, **of_reading: float) -> set[str]:
        facts = facts_of()
        facts.add_reading(replace(READING, **of_reading))
        return {span.style for span in CardLine(facts, "card").lines(60)[place].spans}

    assert GOOD in styles(3, celsius=64)
    assert FAIR in styles(3, celsius=80)
    assert BAD in styles(3, celsius=90)
    for watts in (330.0, 350.0, 353.0):  # at its limit a card is slower, not in danger
        assert FAIR in styles(2, watts=watts)
        assert BAD not in styles(2, watts=watts)


def test_what_is_not_told_is_a_dash_at_first_and_then_left_out():
    assert len(card(facts_of())) == 5
    assert [row.split()[-1] for row in card(facts_of())[1:3]] == ["–", "W"]
    facts = facts_of()
    facts.add_reading(Reading(at_s=1.0, celsius=50))
    assert [row.split()[0] for row in card(facts)] == ["GPU", "temp"]
    assert card(facts_of(CPU)) == []


def test_joules_of_a_token_are_those_between_two_looks_over_the_tokens_between_them():
    facts = facts_of()
    facts.add(reply(1))
    facts.add_reading(replace(READING, at_s=10.0, joules=1000.0))
    facts.add(reply(81))
    facts.add_reading(replace(READING, at_s=11.0, joules=1280.0))
    assert facts.joules_per_token == 3.5  # 280 J, 80 tokens
    facts.add(reply(101))
    facts.add_reading(replace(READING, at_s=12.0, joules=1400.0))
    assert facts.joules_per_token == 4.0  # 400 J, 100 tokens
    assert card(facts)[-1] == "limited by power · 4.00 J/token"
    facts.end()
    facts.add_reading(replace(READING, at_s=60.0, joules=9999.0))  # idle: nobody's tokens
    assert facts.joules_per_token == 4.0
    facts.add(reply(1))
    assert facts.joules_per_token is None  # another reply
    facts.add_reading(replace(READING, at_s=61.0, joules=10_099.0))
    facts.add(reply(11))
    facts.add_reading(replace(READING, at_s=62.0, joules=None, watts=100.0))  # by power from here: 192.7 W in the mean
    assert facts.joules_per_token == pytest.approx(19.27)


def test_a_card_that_tells_no_power_has_no_joules():
    facts = facts_of()
    facts.add(reply(1))
    facts.add_reading(Reading(1.0))
    facts.add(reply(81))
    facts.add_reading(Reading(2.0))
    assert facts.joules_per_token is None


@pytest.mark.parametrize("width", range(13))
def test_no_width_is_too_small(width):
    facts = facts_of()
    facts.add_profile(PROFILE)
    assert all(len(row) <= width for row in kernels(facts, width) + card(facts, width))
