"""The ledger as a bar: cells worked by hand, the legend to the letter, and who else holds memory."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from localq.gpus import Process, Reading
from localq.tui.instruments import instrument_facts
from localq.tui.instruments.instrument_facts import InstrumentFacts, is_ours, read_gpu, read_host_memory
from localq.tui.instruments.memory_bar import MemoryBar, Segment, holders, segment_cells
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
    return "".join(each.letter * count for each, count in segment_cells(segments, width))


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
        "Memory of RTX 3090, 24,564 MiB",
        "W" * 23 + "HKkkkkkSGCOO·",
        "  MiB            used planned   diff",
        "W weights      16,000  16,000  +0.0%",
        "H head          1,000   1,000  +0.0%",
        "K KV cache      4,096   4,096  +0.0%",
        "  K in use 1,024, k reserved 3,072",
        "S scratch         400     400  +0.0%",
        "G graphs           20      25 -20.0%",
        "C CUDA            400     500 -20.0%",
        "= total        21,916  22,021  -0.5%",
        "O others        1,648",
        "· free          1,000",
        "+ snapshots        64  host, max",
        "+ embedding     2,004  host",
        "  firefox 640 MiB = 1.3k tokens",
    ]


def test_a_strip_of_six_lines():
    assert drawn(facts_of(), 46, compact=True) == [
        "Memory 21,916 MiB, planned 22,021 (-0.5%)",
        "W" * 30 + "HHKKkkkkkSGCOOO·",
        "W weights 16,000  H head 1,000",
        "K KV cache 4,096  S scratch 400  G graphs 20",
        "C CUDA 400  O others 1,648  · free 1,000",
    ]


def test_a_narrow_strip_leaves_out_the_unit():
    assert drawn(facts_of(), 38, compact=True)[0] == "Memory 21,916, planned 22,021 (-0.5%)"


def test_what_the_card_does_not_tell_is_a_dash_and_not_in_the_bar():
    rows = drawn(facts_of(reading=None))
    assert rows[0] == "Memory of RTX 3090"
    assert set(rows[1]) == set("WHKkSGC")
    assert [row for row in rows if row[0] in "O·"] == ["O others            –", "· free              –"]


def test_the_cpu_tells_of_the_memory_of_the_machine():
    """500 + 108 + 92 + 1 MiB of 1,000, of which 200 are free; nothing was planned."""
    facts = facts_of(CPU, Reading(total=1000 * MIB, free=200 * MIB), used=0)
    assert drawn(facts, 40) == [
        "Memory of this machine, 1,000 MiB",
        "W" * 20 + "EEEEkkkSOOOO········",  # 25 MiB a cell
        "  MiB            used planned   diff",
        "W weights         500       –      –",
        "E embedding       108       –      –",
        "K KV cache         92       –      –",
        "  K in use 0, k reserved 92",
        "S scratch           1       –      –",
        "= total           701       –      –",
        "O others           99",
        "· free            200",
    ]
    looked = read_host_memory()
    assert 0 < looked.free < looked.total


def test_memory_of_the_host_that_is_not_in_the_ledger_has_lines_of_its_own():
    rows = drawn(facts_of())
    assert [row for row in rows if row.startswith("+")] == [
        "+ snapshots        64  host, max",
        "+ embedding     2,004  host",
    ]
    assert [row for row in rows if not row.startswith("+")] == drawn(
        facts_of(replace(GPU, host={}))
    )  # and is in no sum


def test_components_of_another_version_are_not_lost():
    loaded = replace(GPU, ledger={**GPU.ledger, "lattice": 600 * MIB})
    rows = drawn(facts_of(loaded))
    assert "S scratch       1,000     400  +150%" in rows
    assert "= total        22,516  22,021  +2.2%" in rows


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
