"""The speed graph: figures and dots worked by hand, and what is said of the roof."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq.planner.speed import local_measurements
from localq.stats import Stats
from localq.tui.instruments.instrument_facts import SLICES, InstrumentFacts, Speed
from localq.tui.instruments.speed_graph import NO_ROOF_CARD, SpeedGraph, graph
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
    assert drawn(facts)[0].startswith("tok/s mean 80.0, roof")


# ---- the graph


def test_the_dots_of_three_seconds_under_a_falling_roof():
    """The roof is 936 / 9 = 104 at no positions, 52 at 9,000: 16 dots and 8. Bars: 26, 52 and 52, so 4, 8 and 8."""
    facts = facts_of()
    for seconds, tokens, used in ((1.0, 26, 0), (2.0, 26 + 52, 0), (3.0, 26 + 104, 9000)):
        facts.add(replace(reply(tokens + 1), decode_s=seconds, context_used=used))
    rows = [line.plain for line in graph(facts, 2, 7)]
    assert rows == [
        "     ⠉⠁",  # the line at the top, over three columns
        "     ⠀⠀",
        "52.0 ⠀⣿",  # two bars of 8 dots: the line is the top of the second
        "   0 ⢸⣿",  # before them one of 4
    ]
    assert facts.roof.tokens_per_s(9000) == 52.0


def test_the_roof_is_a_line_before_the_first_reply():
    rows = drawn(facts_of())
    assert rows[0] == "tok/s no reply yet, roof 104"
    facts = facts_of()
    facts.add(Stats("prefill", 5000, prefilled_tokens=1000))
    assert drawn(facts)[0] == "tok/s reading the prompt, roof 104"
    assert rows[1] == " 104 " + "⠉" * 31
    assert rows[2] == " " * 5 + "⠀" * 31
    assert rows[4] == "   0 " + "⠀" * 31
    assert rows[5:] == ["104 tok/s is the limit of 936 GB/s", "(rated)", "9.0 GB read per token"]


def test_the_share_of_the_roof_while_a_reply_runs_and_after_it():
    facts = facts_of()
    for tokens in (1, 81, 161):
        facts.add(reply(tokens, used=400))
    assert drawn(facts)[0] == "tok/s now 80.0, mean 80.0, roof 99.6"  # 936 / 9.4
    assert drawn(facts)[5:] == ["80% of the limit of 936 GB/s (rated)", "9.4 GB read per token"]
    facts.end()  # the mean, under the roof in the middle of the reply, at 320: 936 / 9.32
    assert drawn(facts)[0] == "tok/s mean 80.0, roof 100"
    assert drawn(facts, 46, compact=True)[5:] == ["80% of the limit of 936 GB/s (rated)"]
    assert drawn(facts, 30, compact=True)[5:] == ["80% of the limit of 936 GB/s"]


def test_what_was_measured_on_this_card_is_the_roof():
    local_measurements.keep_bandwidth("GPU-5a1b", 468e9)
    assert drawn(facts_of())[5:] == ["52.0 tok/s is the limit of 468 GB/s", "(measured)", "9.0 GB read per token"]


@pytest.mark.parametrize(("loaded", "said"), [
    (CPU, "bandwidth share: GPU only"),
    (replace(GPU, device_name="A card of tomorrow"), NO_ROOF_CARD),
    (replace(GPU, reads={}), "no bandwidth share for this model"),
])  # fmt: skip
def test_no_roof_is_said_in_words_and_none_is_drawn(loaded, said):
    facts = facts_of(loaded)
    assert " ".join(drawn(facts)[5:]) == said
    assert drawn(facts)[0] == "tok/s no reply yet"
    assert drawn(facts)[1] == "     " + "⠀" * 31
    facts.add(reply(81))
    assert drawn(facts)[1].startswith("80.0 ")


def test_without_a_model_there_is_nothing_to_say():
    assert drawn(InstrumentFacts())[0] == "tok/s: no model loaded"


@pytest.mark.parametrize("width", range(13))
def test_no_width_is_too_small(width):
    facts = facts_of()
    facts.add(reply(300))
    assert all(len(row) <= width for row in drawn(facts, width))


def test_a_narrow_strip_leaves_out_why_there_is_no_roof_and_cuts_no_sentence():
    facts = facts_of(replace(GPU, device_name="A card of tomorrow"))
    assert drawn(facts, 36, compact=True)[-1] == "bandwidth share unknown"
    assert drawn(facts, 66, compact=True)[-1] == NO_ROOF_CARD
