"""The search's kernel itself, compiled for the CPU (cuda_on_cpu.h): indices, barriers, ties, room.

Against the search on the CPU, which sums in another order: where two ways cost the same within rounding, the two may
part. The kernel's speed and what only a GPU shows is tested where there is one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from tests.support.kernels.search_operands import Block, Found, block, followed, search

ROOT = Path(__file__).parents[3]
POINTERS = ("targets", "feedback", "white", "tables")
ROUNDING = 96 * 2**-24  # of f32, in sums of at most 96 numbers around 1


class Event(ctypes.Structure):
    """csrc/search/beam_search.h, SearchEvent."""

    _fields_ = (("book", ctypes.c_int), ("last", ctypes.c_bool))


class SearchBlock(ctypes.Structure):
    """csrc/search/beam_search.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("columns", "step", "events", "books", "tail", "beam")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("event", ctypes.POINTER(Event)),
        ("book", ctypes.c_void_p * 4),
        ("length", ctypes.c_int * 4),
        *((name, ctypes.c_void_p) for name in ("tails", "codes", "errors")),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    if not kernels.host_available():
        pytest.skip(f"no search on the CPU to compare with: {kernels.host_why_not()}")
    out = tmp_path_factory.mktemp("library") / "search.so"
    command = [compiler, "-std=c++17", "-O2", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-I", ROOT / "csrc"]
    subprocess.run([*command, "-o", out, ROOT / "tests/support/kernels/vq_search_on_cpu.cpp"], check=True)
    found = ctypes.CDLL(str(out))
    found.search_on_cpu.restype = ctypes.c_char_p
    return found


@pytest.fixture
def emulated(library, monkeypatch):
    """search(block, order of threads), by the kernel."""

    def run(operands: Block, order: int = 1) -> Found:
        def module() -> SimpleNamespace:
            return SimpleNamespace(vq_search_host=lambda **arguments: launch(library, order, **arguments))

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "module", module)
            return search(operands)

    return run


def launch(library: ctypes.CDLL, order: int, *, events, books, threads, **arguments) -> None:
    """What the binding does."""
    assert threads >= 1
    all_events = (Event * len(events))(*events)
    addresses, lengths = zip(*books, strict=True)
    taken = SearchBlock(
        event=all_events, events=len(events), books=len(books),
        book=(ctypes.c_void_p * 4)(*addresses), length=(ctypes.c_int * 4)(*lengths), **arguments,
    )  # fmt: skip
    fault = library.search_on_cpu(ctypes.byref(taken), order)
    assert fault is None, fault


SHAPES = {
    "2 bits": (3, 24, [(4, 16)], 16),
    "one warp, an odd beam": (3, 28, [(4, 12)], 13),
    "two warps": (2, 20, [(4, 16)], 21),
    "four warps": (2, 24, [(4, 16)], 64),
    "sixteen warps": (1, 12, [(4, 16)], 200),
    "2 x 8": (2, 32, [(8, 8), (8, 8)], 16),
    "3 bits": (2, 24, [(8, 16), (4, 12)], 16),
    "4 bits in two books": (2, 20, [(4, 16), (4, 4)], 9),
    "steps of 2": (2, 14, [(2, 10)], 16),
    "steps of 16, four books": (2, 48, [(16, 32), (16, 16), (16, 32), (16, 16)], 33),
    "greedy": (2, 24, [(4, 16)], 1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_finds_what_the_host_finds(emulated, shape):
    operands = block(*shape)
    expected, got = search(operands), emulated(operands)
    errors, tails = followed(operands, got.codes)
    scale = operands.targets.abs().amax(1, keepdim=True)
    assert bool(((got.errors - errors).abs() <= ROUNDING * scale).all())
    assert bool(((got.tails - tails).abs() <= ROUNDING).all())
    torch.testing.assert_close(got.costs(), expected.costs(), rtol=1e-4, atol=0)
    assert all(torch.equal(*pair) for pair in zip(got.codes, expected.codes, strict=True))


@pytest.mark.parametrize("beam", [16, 64])
def test_the_order_of_threads_changes_nothing(emulated, beam):
    operands = block(2, 16, [(8, 16), (4, 12)], beam)
    first = emulated(operands, order=1)
    for order in (2, 3):
        again = emulated(operands, order=order)
        assert torch.equal(again.errors, first.errors)
        assert all(torch.equal(*pair) for pair in zip(again.codes, first.codes, strict=True))


@pytest.mark.parametrize("beam", [16, 40])
def test_equal_costs_are_taken_in_the_order_of_path_and_code(emulated, beam):
    operands = block(2, 16, [(4, 16)], beam)
    operands.books[0].codewords[:] = operands.books[0].codewords[3].clone()  # all codewords are one
    got = emulated(operands)
    assert got.codes[0].count_nonzero() == 0


@pytest.mark.parametrize("beam", [16, 40])
def test_one_path_far_ahead_of_all_others(emulated, beam):
    """All that is kept comes from one path of one warp."""
    operands = block(2, 16, [(4, 16)], beam)
    codewords = operands.books[0].codewords
    codewords[:] = 1000 * codewords
    codewords[7] = 0
    expected, got = search(operands), emulated(operands)
    torch.testing.assert_close(got.costs(), expected.costs(), rtol=1e-4, atol=0)


def test_costs_beyond_all_numbers_end_in_codes_all_the_same(emulated):
    operands = block(2, 12, [(4, 16)], 21)
    whole = emulated(operands)
    operands.targets[0, 5] = 1e30  # its square is infinite, and what follows is no number
    got = emulated(operands)
    assert torch.equal(got.codes[0][1], whole.codes[0][1])
    assert torch.equal(got.errors[1], whole.errors[1])
