"""The reader of ncu's counters: sums per case, per weight, and what is left on other cards."""

from __future__ import annotations

import pytest

from tests.tools import ncu_counts

HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'


def lines(*kernels):
    """ncu's CSV for kernels (name, instructions, lsu wavefronts, bytes read)."""
    yield "==PROF== Connected to process 7\n"
    yield HEAD
    for number, (name, instructions, lsu, read) in enumerate(kernels):
        values = {
            "smsp__inst_executed.sum": instructions,
            "l1tex__data_pipe_lsu_wavefronts.sum": lsu,
            "dram__bytes_read.sum": read,
        }
        for metric, value in values.items():
            yield f'"{number}","7","{name}","{metric}","","{value:,}"\n'


def test_a_case_is_everything_after_its_marker():
    spin = ("at::cuda::spin_kernel(long)", 9, 9, 9)
    text = lines(spin, ("first", 1000, 500, 8000), ("second", 600, 100, 192), spin, ("third", 64, 0, 640))
    two, one = ncu_counts.counted(text, [("both", 16000), ("one", 640)])
    assert two.per_element("instructions") == pytest.approx(3.2)
    assert two.per_element("lsu") == pytest.approx(1.2)
    assert two.per_element("read") == pytest.approx(0.512)
    issue, lanes = two.margins(6.2)
    assert issue == pytest.approx(128 * 0.512 / 6.2 / 3.2)
    assert lanes == pytest.approx(32 * 0.512 / 6.2 / 1.2)
    assert one.margins(6.2)[1] == float("inf")


def test_missing_markers_are_an_error():
    with pytest.raises(ValueError, match="0 marked launches, 1 cases"):
        list(ncu_counts.counted(lines(("first", 1, 1, 1)), [("one", 1)]))


def test_cases_are_chosen_by_name():
    assert [name for name, _ in ncu_counts._chosen(["dense", "int8"])] == ["dense_gemv, 1 row", "int8_gemv, 1 row"]
    assert ncu_counts._chosen([]) == ncu_counts.CASES
