"""How vq_gemv cuts a launch into stripes of rows and slices of columns (csrc/lookup/gemv_plan.h), compiled for the CPU.

The cuts of what an H200 measured stay as they were. Elsewhere any number of slices is right that costs less than powers
of two do: 5,120 columns are ten times 512, which one table holds, and with 8 or 16 slices tables are partly filled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from localq.files import catalog
from localq.kernels.workspace import WORDS
from tests.support.kernels.cuda_headers import compile_on_cpu

H200, CONSUMER = (132, 232_448), (82, 101_376)  # multiprocessors, shared memory of a block
VQ2, AQLM_2X8 = (4, 0), (8, 8)  # strides of the books: 2 bits a weight
VQ2_2_5, VQ2_3 = (4, 16), (4, 8)
MOST = 32  # slices
WORTH = 1.01  # kWorth


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """out, in, matrices (2: gate and up), rows of x, strides, device -> how that is cut."""
    library = compile_on_cpu(
        tmp_path_factory.mktemp("library"),
        "vq_cut_on_cpu.cpp",
        ["lookup/gemv_launch.cu"],
        launch="",
        faults=("vq_cut",),
    )

    def of(out, columns, count=1, rows=1, strides=VQ2, device=H200):
        found = (ctypes.c_int64 * (7 + 4 * MOST))()
        library.vq_cut_on_cpu(
            ctypes.c_int64(out), ctypes.c_int64(columns), count, *strides, rows, *device,
            ctypes.c_int64(WORDS), found,
        )  # fmt: skip
        names = ("slices", "apart", "blocks", "columns", "tables", "shared", "words")
        by_positions, with_items = list(found)[7::2], list(found)[8::2]
        pairs = list(zip(by_positions, with_items, strict=True))
        together, apart = ({n: each for n, each in enumerate(of, 1) if each[0]} for of in (pairs[:MOST], pairs[MOST:]))
        return SimpleNamespace(**dict(zip(names, list(found)[:7], strict=True)), costs=together, costs_apart=apart)

    return of


# out, in, matrices: slices. csrc/lookup/README.md and localq/data/measurements.toml.
MEASURED = {
    (28_672, 8192, 1): 16, (28_672, 8192, 2): 16, (8192, 8192, 1): 16, (10_240, 8192, 1): 16, (8192, 28_672, 1): 32,
    (12_288, 12_288, 1): 32, (4096, 4096, 1): 8, (2048, 4096, 1): 16, (151_936, 2048, 1): 4,
}  # fmt: skip


@pytest.mark.parametrize(("shape", "slices"), MEASURED.items(), ids=str)
def test_what_was_measured_is_cut_as_it_was(cut, shape, slices):
    assert cut(*shape).slices == slices


@pytest.mark.parametrize("strides", [VQ2, AQLM_2X8], ids=["vq2", "2x8"])
@pytest.mark.parametrize("shape", [(28_672, 8192), (8192, 28_672)], ids=str)
def test_so_are_more_rows_of_x_and_two_books(cut, shape, strides):
    for rows in (1, 2, 4, 8):
        slices = cut(*shape, rows=rows, strides=strides).slices
        assert slices & (slices - 1) == 0, rows


@pytest.mark.parametrize(
    ("shape", "slices", "columns"),
    [
        ((7168, 5120, 1), 10, 512), ((5120, 5120, 1), 10, 512), ((17_408, 5120, 2), 10, 512),
        ((25_600, 5120, 2), 10, 512), ((5120, 17_408, 1), 17, 1024), ((5120, 25_600, 1), 25, 1024),
        ((9728, 2560, 2), 5, 512), ((18_944, 3584, 2), 7, 512),
    ],
    ids=str,
)  # fmt: skip
def test_slices_fill_their_tables(cut, shape, slices, columns):
    found = cut(*shape)
    assert (found.slices, found.columns) == (slices, columns)
    assert shape[1] == slices * columns


def shapes() -> Iterator[tuple[int, int, int]]:
    """out, in and number of the matrices of every launch of a catalogued model without experts."""
    for entry in catalog.load_catalogue():
        arch = entry.arch
        if arch.experts:
            continue
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        yield from ((q + 2 * kv, arch.hidden, 1), (arch.hidden, q, 1))
        yield from ((arch.intermediate, arch.hidden, 2), (arch.hidden, arch.intermediate, 1))


@pytest.mark.parametrize(
    ("strides", "shape", "slices", "of_the_first", "columns"),
    [
        (AQLM_2X8, (28_672, 8192), 16, 8, 1024), (AQLM_2X8, (8192, 28_672), 32, 16, 1792),
        (VQ2_3, (8192, 28_672), 32, 21, 2816), (VQ2_2_5, (12_288, 12_288), 32, 26, 2048),
    ],
    ids=str,
)  # fmt: skip
def test_books_have_slices_of_their_own(cut, strides, shape, slices, of_the_first, columns):
    """So that tables are full, and fewer of them are made."""
    found = cut(*shape, strides=strides)
    assert (found.slices, found.apart, found.columns) == (slices, of_the_first, columns)


@pytest.mark.parametrize("strides", [VQ2, AQLM_2X8, VQ2_3], ids=["vq2", "2x8", "vq2 in 3 bits"])
@pytest.mark.parametrize("device", [H200, CONSUMER], ids=["H200", "consumer card"])
def test_every_model_gets_what_costs_least_and_it_fits(cut, device, strides):
    multiprocessors, shared = device
    for shape in sorted({shape for shape in shapes() if shape[1] % 8 == 0}):
        for rows in (1, 2, 4, 8):
            found = cut(*shape, rows=rows, strides=strides, device=device)
            assert found.slices <= MOST
            assert found.words <= WORDS
            assert found.shared <= shared
            assert found.blocks <= multiprocessors or found.slices == 1 or found.blocks % found.slices == 0, shape
            ways = [*found.costs.items(), *found.costs_apart.items()]
            powers = [each for n, each in ways if n & (n - 1) == 0]
            others = [each for n, each in ways if n & (n - 1)]
            taken = (found.costs_apart if found.apart else found.costs)[found.slices]
            if found.slices & (found.slices - 1) == 0:
                assert taken[0] == min(by_positions for by_positions, _ in powers), shape
            assert taken[1] <= WORTH * min((with_items for _, with_items in others), default=2**62) + 1, shape


@pytest.mark.parametrize(
    ("strides", "columns", "slices", "of_the_first"), [(AQLM_2X8, 1856, 6, 3), (VQ2_2_5, 4208, 8, 6)], ids=str
)
def test_books_apart_that_are_emulated(cut, strides, columns, slices, of_the_first):
    """Those of `test_slices_of_one_book` in test_lookup_kernel_emulated.py."""
    found = cut(49, columns, strides=strides, device=(slices, 232_448))
    assert (found.slices, found.apart) == (slices, of_the_first)


@pytest.mark.parametrize("slices", [3, 5, 7, 11])
def test_the_cuts_that_are_emulated(cut, slices):
    """Those of `test_any_number_of_slices` in test_lookup_kernel_emulated.py."""
    assert cut(33, 512 * slices, device=(slices, 232_448)).slices == slices
