"""Kernel records of a trace -> microseconds of every launch, on invented traces."""

from __future__ import annotations

import random

import pytest

from localq.engine.profile import KernelRecord, attribute_records, group_by_operation
from localq.engine.step.fused import Launch
from localq.errors import LocalqError

MARKER = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<signed char> >"
STEP = [["embed"], ["gemv_a", "gemv_b"], ["attention"], [], ["gemv_a"]]  # kernels of every launch
STARTS = [0.0, 2.0, 3.0, 5.0, 5.5, 9.0]  # in a replay; the last is the end of its last kernel


def trace(replays: int) -> list[KernelRecord]:
    """A capture's fills, the marked run, then replays whose kernels overlap by half a microsecond."""
    fills = [KernelRecord(MARKER, 0.5, 0.6), KernelRecord(MARKER, 0.7, 0.8)]
    records, now = [*fills, KernelRecord("embed", 0.85, 0.9)], 1.0
    for kernels in STEP:
        for name in (MARKER, *kernels):
            records.append(KernelRecord(name, now, now + 0.5))
            now += 1
    records.append(KernelRecord(MARKER, now, now + 0.5))
    for _ in range(replays):
        now += 20
        names = [name for kernels in STEP for name in kernels]
        for i, name in enumerate(names):
            last = i == len(names) - 1
            records.append(KernelRecord(name, now + STARTS[i], now + STARTS[i + 1] + (0 if last else 0.5)))
    return records


def test_a_kernel_gets_the_time_from_the_end_of_the_one_before():
    records = trace(5)
    random.Random(2).shuffle(records)  # records come in any order
    times = attribute_records(records, len(STEP), 5)
    assert times == pytest.approx([2.5, 3.0, 0.5, 0.0, 3.0])
    assert sum(times) == pytest.approx(STARTS[-1])


def test_the_median_of_the_replays_counts():
    records = trace(3)
    slow = records[-1]
    records[-1] = KernelRecord(slow.name, slow.start_us, slow.end_us + 1000)
    assert attribute_records(records, len(STEP), 3)[-1] == pytest.approx(3.0)


@pytest.mark.parametrize("damage", ["one record less", "another kernel", "a marker less"])
def test_replays_that_hold_other_kernels_are_refused(damage):
    records = trace(3)
    if damage == "one record less":
        records.pop()
    elif damage == "another kernel":
        records[-2] = KernelRecord("other", records[-2].start_us, records[-2].end_us)
    else:
        records = [record for record in records if record.name != MARKER]
        records.insert(0, KernelRecord(MARKER, 0.0, 0.1))
    with pytest.raises(LocalqError, match="3 replays recorded"):
        attribute_records(records, len(STEP), 3)


def test_rows_join_launches_of_one_kind_in_order_of_first_use():
    def launch(operation: str, size: int) -> Launch:
        return Launch(operation, lambda: None, lambda live: size * live)

    launches = [launch("embed", 1), launch("qkv", 2), launch("o", 3), launch("qkv", 4)]
    rows = group_by_operation(launches, [1.0, 2.0, 3.0, 4.5], live=10)
    assert [(row.kernel, row.calls, row.us, row.bytes) for row in rows] == [
        ("embed", 1, 1.0, 10),
        ("qkv", 2, 6.5, 60),
        ("o", 1, 3.0, 30),
    ]
