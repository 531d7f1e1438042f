"""The memory as a bar: cells worked by hand, the gauges to the letter, and who else holds memory."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from localq.gpus import Process, Reading
from localq.tui.gauge import BAD, FAIR, GOOD, REST_STYLE
from localq.tui.instruments import instrument_facts
from localq.tui.instruments.instrument_facts import InstrumentFacts, is_ours, read_gpu, read_host_memory
from localq.tui.instruments.memory_bar import IN_USE, MemoryBar, Segment, holders, segment_cells
from tests.support.tui.instruments_lab import CPU, CTX, GPU, MIB, READING, Watch, reply


def facts_of(loaded=GPU, reading: Reading | None = READING, used: int = CTX // 4) -> InstrumentFacts:
    facts = InstrumentFacts(lambda: 0.0, Watch())
    facts.load(loaded)
    facts.add(reply(2, used=used))
    if reading is not None:
        facts.add_reading(reading)
    return facts


def drawn(facts: InstrumentFacts, width: int = 36, compact: bool = False) -> list[str]:
    ledger = MemoryBar(facts, "memory")
    ledger.compact = compact
    return [each.plain for each in ledger.lines(width)]


def cells(width: int, **sizes: int) -> str:
    segments = [Segment(*size, "") for size in sizes.items()]
    return "".join(each.name * count for each, count in segment_cells(segments, width))


# ---- the bar


@pytest.mark.parametrize(("width", "sizes", "bar"), [
    (10, {"W": 50, "K": 30, "F": 20}, "WWWWWKKKFF"),
    (10, {"W": 1}, "WWWWWWWWWW"),
    (10, {"W": 1000, "G": 1, "K": 1000}, "WWWWWGKKKK"),  # nothing vanishes; who has most too much gives
    (3, {"W": 1, "K": 1}, "WWK"),
    (4, {"W": 97, "G": 1, "S": 1, "C": 1}, "WGSC"),
    (2, {"G": 1, "W": 97, "K": 50}, "WK"),  # no room for all: the largest
    (1, {"G": 1, "W": 97}, "W"),
    (0, {"W": 1}, ""),
    (9, {}, ""),
])  # fmt: skip
def test_cells_by_proportion(width, sizes, bar):
    assert cells(width, **sizes) == bar


def test_a_card_to_the_letter():
    """24,564 MiB on 36 cells: 682 a cell. In use 1,024 of 4,096; the others' are 24,564 - 1,000 - 21,916."""
    assert drawn(facts_of()) == [
        "Memory ──────────── 23.0 of 24.0 GiB",
        "█" * 26 + "░" * 5 + "█" * 2 + "▒" * 2 + "─",
        "weights   ━━━━━━━━────    16,000 MiB",
        "head      ╸───────────     1,000 MiB",
        "KV cache  ━━──────────     4,096 MiB",
        "  in use  ━━━───────── 25% 1,024 MiB",
        "buffers   ╸───────────       400 MiB",
        "CUDA      ╸───────────       420 MiB",
        "others    ━───────────     1,648 MiB",
        "  firefox 640 MiB = 1.3k tokens",
        "free      ╸───────────     1,000 MiB",
        "planned 22,021 MiB, allocated 21,916",
        "host RAM             up to 2,068 MiB",
    ]


def test_the_bar_has_the_colours_and_the_order_of_the_gauges():
    bar, *meters = MemoryBar(facts_of(), "memory").lines(80)[1:]
    colours = dict.fromkeys(span.style for span in bar.spans)
    gauges = [span.style for each in meters[:8] for span in each.spans]
    assert [each for each in colours if each != REST_STYLE] == [
        each for each in dict.fromkeys(gauges) if each in colours and each != REST_STYLE
    ]
    assert len(colours) == 7


def test_the_cache_in_use_is_coloured_by_how_full_it_is():
    def styles(used: int) -> set[str]:
        return {span.style for row in MemoryBar(facts_of(used=used), "memory").lines(80) if IN_USE in row.plain
                for span in row.spans}  # fmt: skip

    assert GOOD in styles(CTX // 4)
    assert FAIR in styles(8 * CTX // 10)
    assert BAD in styles(95 * CTX // 100)


def test_a_strip_of_six_lines():
    assert drawn(facts_of(), 46, compact=True) == [
        "Memory ────────────────────── 23.0 of 24.0 GiB",
        "█" * 34 + "░" * 5 + "█" * 2 + "▒" * 3 + "──",
        "weights 16,000 MiB  head 1,000 MiB",
        "KV cache 4,096 MiB  buffers 400 MiB",
        "CUDA 420 MiB  others 1,648 MiB  free 1,000 MiB",
    ]
    with_embedding = replace(GPU, ledger={**GPU.ledger, "embedding": 1_000 * MIB})
    assert drawn(facts_of(with_embedding), 36, compact=True)[2:] == [  # no room for the unit at each
        "weights 16,000 MiB  embedding 1,000",
        "head 1,000  KV cache 4,096",
        "buffers 400  CUDA 420  others 648",
        "free 1,000",
    ]


# ---- a limit


TWO = {"weights": 645 * MIB, "head": 115 * MIB, "kv_cache": 254 * MIB, "scratch": 178 * MIB, "cuda_context": 754 * MIB}
SMALL = replace(GPU, ledger=TWO, predicted={**TWO, "cuda_context": 844 * MIB}, host={})
LARGE = replace(READING, total=143_771 * MIB, free=141_275 * MIB)


def limited(gib: float, reading: Reading | None = LARGE, loaded=SMALL) -> InstrumentFacts:
    facts = facts_of(loaded, reading)
    facts.load(loaded, round(gib * 2**30))
    if reading is not None:
        facts.add_reading(reading)
    return facts


def test_under_a_limit_all_is_scaled_to_it():
    """2,048 MiB on 36 cells: 57 a cell. Of the card 141,275 MiB are free, of the limit 102."""
    assert drawn(limited(2)) == [
        "Memory ───── 1.9 of 2.0 GiB (--vram)",
        "█" * 13 + "░" * 5 + "█" * 16 + "──",
        "weights   ━━━━────────       645 MiB",
        "head      ╸───────────       115 MiB",
        "KV cache  ━╸──────────       254 MiB",
        "  in use  ────────────  0%     0 MiB",
        "buffers   ━───────────       178 MiB",
        "CUDA      ━━━━╸───────       754 MiB",
        "free      ╸───────────       102 MiB",
        "card      ╸──────── 2.4 of 140.4 GiB",
        "  firefox 640 MiB = 20.6k tokens",
        "planned 2,036 MiB, allocated 1,946",
    ]


@pytest.mark.parametrize("compact", [False, True])
def test_memory_beyond_the_limit_is_not_free(compact):
    for gib in (2, 2.5, 8, 100):
        said = " ".join(drawn(limited(gib), compact=compact))
        assert f"free {gib * 1024 - 1946:,.0f} MiB" in " ".join(
            said.replace("─", " ").replace("━", " ").replace("╸", " ").split()
        )


def test_what_others_have_taken_of_the_limit_is_theirs():
    """Of 2,048 MiB 1,946 are allocated, and of the other 102 only 40 are free."""
    rows = [
        " ".join(row.replace("─", "").replace("╸", "").split())
        for row in drawn(limited(2, replace(LARGE, free=40 * MIB)))
    ]
    assert "others 62 MiB" in rows
    assert "free 40 MiB" in rows


def test_before_the_first_reading_the_limit_is_known():
    assert drawn(limited(2, None))[0] == "Memory ───── 1.9 of 2.0 GiB (--vram)"
    assert not [row for row in drawn(limited(2, None)) if row.startswith("card")]


def test_a_limit_above_the_card_and_one_on_the_cpu_limit_nothing():
    assert drawn(limited(200)) == drawn(facts_of(SMALL, LARGE, used=0))
    assert drawn(limited(200))[0].endswith("of 140.4 GiB")
    assert limited(2, None, CPU).limit is None


def test_only_a_card_that_is_nearly_full_is_red():
    def styles(free: int) -> set[str]:
        lines = MemoryBar(limited(2, replace(LARGE, free=free * MIB)), "memory").lines(80)
        return {span.style for row in lines if row.plain.startswith("card") for span in row.spans}

    assert GOOD in styles(141_275)
    assert FAIR in styles(6_000)
    assert BAD in styles(1_000)
    shown = [*MemoryBar(facts_of(), "memory").lines(60), *MemoryBar(limited(2), "memory").lines(60)]
    assert not [row.plain for row in shown for span in row.spans if span.style == BAD]


def test_what_the_card_does_not_tell_is_left_out():
    rows = drawn(facts_of(reading=None))
    assert rows[0] == "Memory ──────────────────── 21.4 GiB"
    assert "─" not in rows[1]
    assert not [row for row in rows if row.startswith(("others", "free"))]


def test_the_cpu_tells_of_the_memory_of_the_machine():
    """500 + 108 + 92 + 1 MiB of 1,000, of which 200 are free; nothing was planned."""
    facts = facts_of(CPU, Reading(total=1000 * MIB, free=200 * MIB), used=0)
    assert drawn(facts, 40) == [
        "Memory ────────────────── 0.8 of 1.0 GiB",
        "█" * 24 + "░░░" + "█" + "▒▒▒▒" + "────────",  # 25 MiB a cell
        "weights   ━━━━━━━━────────       500 MiB",
        "embedding ━╸──────────────       108 MiB",
        "KV cache  ━╸──────────────        92 MiB",
        "  in use  ────────────────  0%     0 MiB",
        "buffers   ╸───────────────         1 MiB",
        "others    ━╸──────────────        99 MiB",
        "free      ━━━─────────────       200 MiB",
    ]
    looked = read_host_memory()
    assert 0 < looked.free < looked.total


def test_memory_of_the_host_is_in_no_sum():
    rows = drawn(facts_of())
    assert rows[-1].split() == ["host", "RAM", "up", "to", "2,068", "MiB"]
    assert rows[:-1] == drawn(facts_of(replace(GPU, host={})))
    assert drawn(facts_of(replace(GPU, host={"embedding": 9 * MIB})))[-1].split() == ["host", "RAM", "9", "MiB"]


def test_components_of_another_version_are_not_lost_and_what_takes_more_than_planned_is_named():
    rows = drawn(facts_of(replace(GPU, ledger={**GPU.ledger, "lattice": 600 * MIB})))
    assert "planned 22,021 MiB, allocated 22,516" in rows
    assert "buffers: 1,000 MiB, planned 400" in rows
    assert not any(row.startswith(("CUDA:", "weights:")) for row in rows)


def test_without_a_model_there_is_nothing_to_say():
    assert drawn(InstrumentFacts()) == []


# ---- who else


def test_holders_are_told_in_tokens_of_the_context():
    others = [Process(1, 640 * MIB, "firefox"), Process(2, MIB, ""), Process(3, None, "Xorg"), Process(4, 5, "a\x1bb")]
    assert holders(others, MIB / 2) == [
        "firefox 640 MiB = 1.3k tokens", "process 2 1 MiB = 2 tokens", "ab 0 MiB = 0 tokens",
    ]  # fmt: skip
    assert holders([Process(1, 640 * MIB, "firefox")], 0) == ["firefox 640 MiB"]
    assert len(holders([Process(n, MIB, "x") for n in range(9)], 0)) == 3


def test_our_own_processes_are_no_others(monkeypatch):
    monkeypatch.setattr(instrument_facts, "is_ours", lambda pid: pid == 11)
    watch = Watch(replace(READING, processes=(Process(11, 9 * MIB, "python"), Process(22, MIB, "Xorg"))))
    assert read_gpu(watch).processes == (Process(22, MIB, "Xorg"),)
    watch.reading = replace(READING, processes=None)
    assert read_gpu(watch).processes is None


def test_ours_are_this_process_and_its_children():
    assert is_ours(os.getpid())
    assert not is_ours(os.getppid())
    assert not is_ours(2**22 + 1)  # none has it


@pytest.mark.parametrize("width", range(13))
@pytest.mark.parametrize("compact", [False, True])
def test_no_width_is_too_small(width, compact):
    assert all(len(row) <= width for row in drawn(facts_of(), width, compact))
