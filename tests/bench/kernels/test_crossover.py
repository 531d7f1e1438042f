"""Where NF4 products change their way: the rule on times worked by hand, the data, and a run with stand-ins."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from localq.bench.kernels import crossover
from localq.bench.kernels.crossover import Point
from localq.bench.kernels.roofline import Timing
from localq.bench.kernels.timing import Bench
from localq.errors import ExitCode, LocalqError
from localq.formats.nf4 import crossover as nf4_crossover
from tests.support.kernels import reference_kernels


def points(*times, shape=(64, 128)):
    """Rows, microseconds of nf4_gemm, microseconds of the other way."""
    return [Point(shape, *each) for each in times]


def test_the_other_way_begins_behind_the_last_win():
    assert crossover.rows_from(points((16, 5, 20), (64, 19, 20), (128, 38, 21))) == 65
    assert crossover.rows_from(points((16, 5, 20), (64, 21, 20), (128, 20, 21), (192, 30, 21))) == 129  # a dent


def test_the_shapes_of_a_class_are_added_up():
    both = points((64, 10, 30), (128, 40, 30)) + points((64, 12, 5), (128, 11, 10), shape=(32, 64))
    assert crossover.rows_from(both) == 65


def test_a_kernel_that_never_wins_begins_at_nine_rows_and_one_that_always_does_behind_all():
    assert crossover.rows_from(points((16, 21, 20), (64, 60, 20))) == 9
    assert crossover.rows_from(points((16, 5, 20), (64, 6, 20))) == 65


def test_classes_by_the_number_of_weights():
    assert [nf4_crossover.class_of(count) for count in (64, 2**24, 2**24 + 64, 2**26, 2**26 + 64, 2**33)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip
    assert [{nf4_crossover.class_of(out * columns) for out, columns in shapes} for shapes in crossover.SHAPES] == [
        {0},
        {1},
        {2},
    ]


def test_a_gpu_that_was_not_measured_takes_the_default(monkeypatch):
    assert nf4_crossover.rows_from("Some GPU", 2**20) == nf4_crossover.DEFAULT[0]
    monkeypatch.setitem(nf4_crossover.MEASURED, "Some GPU", (9, 33, 129))
    assert [nf4_crossover.rows_from("Some GPU", count) for count in (2**24, 2**25, 2**27)] == [9, 33, 129]


def test_measured_data_is_sound():
    for rows in (nf4_crossover.DEFAULT, *nf4_crossover.MEASURED.values()):
        assert len(rows) == len(nf4_crossover.BOUNDS) + 1
        assert all(each >= crossover.FEWEST for each in rows)
    assert list(nf4_crossover.BOUNDS) == sorted(nf4_crossover.BOUNDS)


@pytest.fixture
def machine(monkeypatch):
    """A GPU that is none: stand-ins run on the CPU, and nf4_gemm takes a microsecond per row, the other way 40."""
    reference_kernels.install(monkeypatch)

    def time(bench, launches):
        results = [each() for each in launches]
        rows = 0 if results[0] is None else results[0].shape[0]  # the other way returns nothing
        return Timing(*[float(rows or 40)] * 3)

    monkeypatch.setattr(Bench, "time", time)
    monkeypatch.setattr(Bench, "copies", lambda bench, size: 2)
    monkeypatch.setattr(crossover.devices, "pick", lambda name: SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr(kernels, "why_not", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")


def test_a_run_prints_the_line_of_the_data_file_and_one_of_json(machine):
    out = io.StringIO()
    shapes = (((48, 128), (17, 64)), ((33, 64),))
    result = crossover.run(out, shapes=shapes, rows=(16, 32, 64))
    lines = out.getvalue().splitlines()
    assert '    "Some GPU": (33, 33),' in lines
    assert json.loads(lines[-1]) == json.loads(json.dumps(result))
    assert result["schema"] == 1
    assert result["rows_from"] == [33, 33]
    assert len(result["points"]) == 9


def test_a_wrong_kernel_is_not_timed(machine, monkeypatch):
    monkeypatch.setattr(crossover.nf4_kernel, "nf4_gemm", lambda x, matrix, out=None: torch.zeros(16, 48).half())
    with pytest.raises(LocalqError, match="nf4_gemm"):
        crossover.run(io.StringIO(), shapes=(((48, 128),),), rows=(16,))


def test_without_kernels_it_says_why(machine, monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda: "not built")
    with pytest.raises(LocalqError, match="not built") as caught:
        crossover.run(io.StringIO())
    assert caught.value.exit_code == ExitCode.NO_DEVICE
