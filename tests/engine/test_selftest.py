"""The self-test at first use: run once, remembered by GPU, driver and build, refused by name, never in the way."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from localq import kernels
from localq.engine import selftest
from localq.engine.selftest.compare import Mismatch
from localq.errors import ExitCode, LocalqError
from localq.kernels import selftest_results
from localq.kernels.selftest_results import Place, SelftestResult

GPU = torch.device("cuda", 0)
HERE = Place("NVIDIA GeForce RTX 3090", "GPU-5a1b", (8, 6), "580.65.06")


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """The file that remembers, in a folder of its own."""
    monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selftest_results, "build_hash", lambda: "a build")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return selftest_results.path()


class Kernels:
    """Invented checks; `ran` counts, `broken` is the name of the one that fails."""

    def __init__(self, broken: str = "", error: Exception | None = None) -> None:
        self.broken, self.error, self.ran = broken, error or Mismatch("element 3 is off by 2"), 0

    def ensure(self, place: Place = HERE) -> tuple[str, ...]:
        checks = {name: self._check(name) for name in ("nf4_dequantize", "nf4_gemv", "sample")}
        return selftest.ensure(GPU, checks, lambda device: place)

    def _check(self, name):
        def check(device):
            assert device == GPU
            self.ran += 1
            if name == self.broken:
                raise self.error

        return check


def test_it_runs_once():
    checks = Kernels()
    assert checks.ensure() == ()
    assert checks.ran == 3
    assert checks.ensure() == ()
    assert checks.ran == 3
    assert selftest_results.recall(HERE) == SelftestResult(HERE.gpu, HERE.driver)


@pytest.mark.parametrize("error", [Mismatch("element 3 is off by 2"), RuntimeError("no kernel image")], ids=str)
def test_a_failure_names_the_kernel_and_is_tested_again(error):
    broken = Kernels("nf4_gemv", error)
    for _ in range(2):
        with pytest.raises(LocalqError) as caught:
            broken.ensure()
        assert caught.value.exit_code == ExitCode.NO_DEVICE
        assert "nf4_gemv produces wrong results on NVIDIA GeForce RTX 3090 with driver 580.65.06" in str(caught.value)
        assert "--device cpu" in str(caught.value)
    assert broken.ran == 4  # two of three checks, twice
    assert selftest_results.recall(HERE) == SelftestResult(HERE.gpu, HERE.driver, "nf4_gemv")
    assert Kernels().ensure() == ()  # cured
    assert selftest_results.recall(HERE) == SelftestResult(HERE.gpu, HERE.driver)


@pytest.mark.parametrize(
    "other",
    [replace(HERE, driver="590.1"), replace(HERE, uuid="GPU-77"), replace(HERE, capability=(8, 9))],
    ids=["driver", "card", "capability"],
)
def test_another_driver_or_card_is_tested(other):
    Kernels().ensure()
    checks = Kernels()
    checks.ensure(other)
    assert checks.ran == 3
    assert selftest_results.recall(HERE) is not None  # both are remembered


def test_another_build_is_tested(monkeypatch):
    Kernels().ensure()
    monkeypatch.setattr(selftest_results, "build_hash", lambda: "another build")
    checks = Kernels()
    checks.ensure()
    assert checks.ran == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"verdicts": 3}', '{"verdicts": {"KEY": 1}}', "\0" * 40], ids=repr)
def test_a_damaged_memory_only_means_that_it_runs_again(memory, text):
    memory.parent.mkdir()
    memory.write_text(text.replace("KEY", HERE.key()))
    checks = Kernels()
    assert checks.ensure() == ()
    assert checks.ran == 3
    assert selftest_results.recall(HERE) == SelftestResult(HERE.gpu, HERE.driver)


def test_a_folder_that_cannot_be_written_is_one_note(memory):
    memory.parent.write_text("a file where the folder belongs")
    checks = Kernels()
    (note,) = checks.ensure()
    assert "because its result cannot be saved in " in note
    checks.ensure()
    assert checks.ran == 6


def test_old_verdicts_are_dropped_and_no_part_is_left(memory):
    for number in range(selftest_results.MOST + 5):
        selftest_results.remember(replace(HERE, driver=str(number)), SelftestResult("x", str(number)))
    assert selftest_results.recall(replace(HERE, driver="3")) is None
    assert selftest_results.recall(replace(HERE, driver=str(selftest_results.MOST + 4))) is not None
    assert [file.name for file in memory.parent.iterdir()] == [selftest_results.FILE]


def test_the_cpu_needs_none():
    assert selftest.ensure(torch.device("cpu")) == ()


@pytest.mark.cuda
def test_every_kernel_passes_here_and_quickly(monkeypatch):
    monkeypatch.undo()
    started = time.perf_counter()
    assert selftest.first_failure(GPU) == ("", "")
    assert time.perf_counter() - started < 10  # the first launch of a process loads machine code as well
    started = time.perf_counter()
    assert selftest.first_failure(GPU) == ("", "")
    assert time.perf_counter() - started < 1.5


@pytest.mark.cuda
def test_a_place_is_known():
    place = selftest.place_of(GPU)
    assert place.uuid.startswith("GPU-")
    assert place.driver
    assert kernels.available()
