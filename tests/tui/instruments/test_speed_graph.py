"""The speed graph: figures and cells worked by hand, and what is said of the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq.planner.speed import local_measurements
from localq.stats import Stats
from localq.tui.gauge import BAD, FAIR, GOOD, MUTED
from localq.tui.instruments.instrument_facts import SLICES, InstrumentFacts, Speed
from localq.tui.instruments.speed_graph import CURVE, NO_ROOF_CARD, SpeedGraph, axis_end, graph, stretch
from tests.support.tui.instruments_lab import CPU, GPU, Watch, reply

pytestmark = pytest.mark.usefixtures("own_cache")


def facts_of(loaded=GPU) -> InstrumentFacts:
    facts = InstrumentFacts(lambda: 0.0, Watch())
    facts.load(loaded)
    return facts


def drawn(facts: InstrumentFacts, width: int = 36, compact: bool = False) -> list[str]:
    graph = SpeedGraph(facts, "speed")
    graph.compact = compact
    return [each.plain for each in graph.lines(width)]


# ---- slices


def test_tokens_are_counted_over_the_seconds_of_decoding():
    speed = Speed()
    for tokens in (1, 41, 81, 141):  # the first belongs to the prefill; 40 in a half second, twice; 60 in 0.75 s
        speed.add(reply(tokens))
    assert [(part.tokens, part.seconds) for part in speed.slices] == [(80.0, 1.0), (60.0, 0.75)]
    assert speed.now == 80.0


def test_a_pause_of_the_engine_shows_in_every_second_of_it():
    speed = Speed()
    speed.add(reply(81))
    speed.add(replace(reply(81 + 30), decode_s=4.0))
    assert [part.tokens_per_s for part in speed.slices] == [80, 10, 10, 10]
    speed.add(replace(reply(81 + 30), decode_s=1e6, generated_tokens=112))
    assert len(speed.slices) == SLICES


def test_now_is_of_the_last_two_seconds_of_this_reply_alone():
    speed = Speed()
    speed.add(reply(801))
    speed.end()
    assert speed.now == 0.0
    speed.add(Stats("prefill", 100))
    assert speed.now == 0.0
    speed.add(reply(21, 20.0))
    assert speed.now == 20.0
    speed.add(replace(reply(21 + 60, 20.0), decode_s=2.0))
    speed.add(replace(reply(21 + 60 + 60, 20.0), decode_s=3.0))
    assert speed.now == 60.0
    assert [part.tokens_per_s for part in speed.slices][-3:] == [20.0, 60.0, 60.0]


def test_a_reply_that_follows_without_a_word_is_another_one():
    speed = Speed()
    speed.add(reply(101))
    speed.add(Stats("prefill", 100))
    speed.add(reply(41))
    assert speed.last.generated_tokens == 41
    assert speed.now == 80.0


def test_a_reply_that_is_over_with_its_first_event_counts_once():
    facts = facts_of()
    done = replace(reply(81), phase="done")
    for _ in range(2):
        facts.add(done)
    facts.end()
    assert [(part.tokens, part.seconds) for part in facts.speed.slices] == [(80.0, 1.0)]
    assert not facts.speed.running
    assert drawn(facts)[0] == "Speed ─────────────────── 80.0 tok/s"


def test_the_curve_is_of_one_reply_and_stays_until_the_next_one_has_begun():
    speed = Speed()
    assert speed.curve == []
    speed.add(reply(241))
    assert [part.tokens_per_s for part in speed.curve] == [80, 80, 80]
    speed.end()
    speed.add(Stats("prefill", 100))
    assert len(speed.curve) == 3
    speed.add(reply(41, 40.0))
    assert [part.tokens_per_s for part in speed.curve] == [40]


# ---- the graph


def test_a_curve_is_stretched_over_the_width():
    assert stretch([10, 20, 40], 5) == [10, 15, 20, 30, 40]
    assert stretch([10, 20, 30, 40, 50], 3) == [10, 30, 50]
    assert stretch([7], 3) == [7, 7, 7]
    assert stretch([], 3) == [0, 0, 0]
    assert stretch([7, 8], 1) == [7]
    assert stretch([7, 8], 0) == []


def plain(rates: list[float], cells: int) -> list[str]:
    return [line.plain for line in graph(rates, cells, 5 + cells)]


def test_the_axis_begins_at_zero():
    assert plain([40, 20, 10], 3) == [
        "  40 █  ",
        "     █  ",
        "     ██ ",
        "   0 ███",
    ]


def test_the_axis_ends_at_a_round_figure():
    """0 to 1,200 on 32 eighths: 1,026 are 27, 900 are 24."""
    assert plain([1026, 900], 2) == ["1200 ▃ ", "     ██", "     ██", "   0 ██"]
    assert [axis_end(each) for each in (0, 0.07, 1, 1.01, 9.6, 40, 80, 81, 1026, 99_999)] == pytest.approx(
        [0, 0.08, 1, 1.2, 10, 40, 80, 100, 1200, 100_000]
    )
    assert plain([12_000], 1)[0] == " 12k █"


@pytest.mark.parametrize("rates", [[1026.0] * 9, [40.0, 20.0, 10.0], [3.0]])
def test_the_area_has_one_tone(rates):
    """Two would be read as two quantities on top of each other."""
    drawn = [
        row.plain[span.start : span.end] for row in graph(rates, 9, 14) for span in row.spans if span.style == CURVE
    ]
    assert len(drawn) == 4
    assert {span.style for row in graph(rates, 9, 14) for span in row.spans} == {CURVE, MUTED}  # the axis


def test_no_speed_is_no_curve():
    assert plain([], 3) == [" " * 8] * 4


def test_the_limit_before_the_first_reply_is_a_figure():
    rows = drawn(facts_of())
    assert rows == [
        "Speed ───────────────── no reply yet",
        "limit     ────────────           104",
        "936 GB/s (rated), 9.0 GB a token",
    ]
    facts = facts_of()
    facts.add(Stats("prefill", 5000, prefilled_tokens=1000))
    assert drawn(facts)[0].endswith(" processing the prompt")


def test_the_share_of_the_limit_while_a_reply_runs_and_after_it():
    facts = facts_of()
    for tokens in (1, 81, 161):
        facts.add(reply(tokens, used=400))
    assert drawn(facts)[0] == "Speed ─────────────────── 80.0 tok/s"
    assert drawn(facts)[5:] == ["limit     ━━━━━━━━━╸──   80% of 99.6", "936 GB/s (rated), 9.4 GB a token"]  # 936 / 9.4
    facts.end()  # the mean, under the limit in the middle of the reply, at 320: 936 / 9.32
    assert drawn(facts)[5] == "limit     ━━━━━━━━━╸──    80% of 100"
    assert len(drawn(facts, 46, compact=True)) == 6


def test_the_limit_is_coloured_by_the_share():
    def styles(tokens_per_s: float) -> set[str]:
        facts = facts_of()
        facts.add(reply(161, tokens_per_s, used=400))
        return {span.style for span in SpeedGraph(facts, "speed").lines(60)[5].spans}

    assert GOOD in styles(80)
    for rate in (45, 20, 1):  # low is no fault: neither yellow nor red
        assert MUTED in styles(rate)
        assert not {each for each in styles(rate) for alarm in (GOOD, FAIR, BAD) if alarm in str(each)}


def test_what_was_measured_on_this_card_is_the_limit():
    local_measurements.keep_bandwidth("GPU-5a1b", 468e9)
    assert drawn(facts_of())[2] == "468 GB/s (measured), 9.0 GB a token"


@pytest.mark.parametrize(("loaded", "said"), [
    (CPU, ""), (replace(GPU, device_name="A card of tomorrow"), NO_ROOF_CARD), (replace(GPU, reads={}), ""),
])  # fmt: skip
def test_where_there_is_no_limit_none_is_drawn(loaded, said):
    facts = facts_of(loaded)
    assert " ".join(drawn(facts)[1:]) == said
    assert drawn(facts)[0].endswith(" no reply yet")
    facts.add(reply(81))
    assert drawn(facts)[1].startswith("  80 ")
    assert not any(row.startswith("limit") for row in drawn(facts))


def test_without_a_model_there_is_nothing_to_say():
    assert drawn(InstrumentFacts()) == ["Speed ────────────── no model loaded"]


@pytest.mark.parametrize("width", range(13))
def test_no_width_is_too_small(width):
    facts = facts_of()
    facts.add(reply(300))
    assert all(len(row) <= width for row in drawn(facts, width))


def test_drafts_have_a_gauge_of_their_own_and_the_limit_is_that_of_steps():
    facts = facts_of()
    plain = replace(reply(81), phase="done")
    facts.add(plain)
    facts.end()
    before = drawn(facts)
    assert not any("drafts" in each for each in before)
    drafted = replace(plain, generated_tokens=161, decode_steps=80, drafted={"lookup": 100}, accepted={"lookup": 80})
    facts = facts_of()
    facts.add(drafted)
    facts.end()
    lines = drawn(facts)
    assert any(each.startswith("drafts") and "80% accepted, 2.0 per step" in each for each in lines)
    shares = [next(each for each in found if each.startswith("limit")).split(" of ")[0] for found in (before, lines)]
    assert shares[0] == shares[1]  # twice the tokens in as many steps
    assert not any("drafts" in each for each in drawn(facts, compact=True))
