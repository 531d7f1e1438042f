"""vq_dequantize: what it refuses; bit for bit on a GPU, and on the CPU (vq_machine_on_cpu.cuh), where
conflicts between banks of shared memory are counted: there are none."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from localq.formats.codebooks import aqlm, vq2, vq2_codec
from localq.formats.codebooks import dequantize_kernel as wrapper
from localq.formats.codebooks.dequantize_kernel import vq_dequantize, vq_dequantize_bytes
from localq.formats.codebooks.linear import VqLinear
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.gather_operands import aqlm_packed, integers, normal
from tests.support.kernels.nf4_operands import bits
from tests.support.kernels.refusals import refused_by_name

KERNELS = ("lookup/dequantize.cu", "lookup/additive_dequantize.cu")
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LARGE, SMALL = (3, 232_448), (2, 101_376)  # multiprocessors, shared memory of a block: of an H200, of a consumer card
FAST = {
    "s4l16": ((4, 16),), "s4l16+s16l16": ((4, 16), (16, 16)), "s4l16+s8l16": ((4, 16), (8, 16)),
    "s4l16+s4l16": ((4, 16), (4, 16)), "s8l8": ((8, 8),), "s8l8+s8l8": ((8, 8), (8, 8)),
}  # fmt: skip
OTHERS = {"s2l6": ((2, 6),), "s8l24+s4l20": ((8, 24), (4, 20)), "s16l32": ((16, 32),)}
AQLM = {"1x8": (1, 256, 1, 8), "2x8": (2, 256, 1, 8), "2x5": (2, 32, 1, 8), "2x8g4": (2, 256, 1, 4)}


SIZES = ("scales", "out_features", "in_features", "rounded")


class Book(ctypes.Structure):
    """csrc/lookup/dequantize.h, TiledBook."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "codebook")),
        *((name, ctypes.c_int64) for name in ("entries", "length", "stride", "before", "tile_positions")),
    )


class Matrix(ctypes.Structure):
    """TiledMatrix."""

    _fields_ = (
        ("book", Book * 2), ("books", ctypes.c_int), ("scales", ctypes.c_void_p), ("out", ctypes.c_int64),
        ("columns", ctypes.c_int64), ("rounded", ctypes.c_bool),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "vq_dequantize_on_cpu.cpp", KERNELS, faults=("vq_dequantize",)
    )


@pytest.fixture
def emulated(library, monkeypatch):
    """Rows of a Linear by the kernel, on a device (`LARGE` or `SMALL`); and how often it looked up and stored."""
    counts = (ctypes.c_int64 * 4)()

    def run(linear: VqLinear, first: int, out: torch.Tensor, rounded: bool, on=LARGE) -> list[int]:
        def launch(*, books, stored, out, type, row_begin, row_count, device, stream, **sizes):
            held = (Book * 2)(*(Book(*book.values()) for book in books))
            matrix = Matrix(held, len(books), *(sizes[name] for name in SIZES))
            library.vq_dequantize_on_cpu(
                ctypes.byref(matrix), stored, ctypes.c_void_p(out), type, ctypes.c_int64(row_begin),
                ctypes.c_int64(row_count), *device, counts,
            )  # fmt: skip

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "module", lambda: SimpleNamespace(vq_dequantize=launch))
            patch.setattr(wrapper, "check_cuda", lambda *given: None)
            patch.setattr(wrapper, "place", lambda tensor: {"device": on, "stream": 0})
            linear = copy.deepcopy(linear).put_into_tiles()  # in place: the matrix may be asked for again
            vq_dequantize(linear.tiles, [book.values for book in linear.books()], first, out, rounded=rounded)
        assert list(counts)[1::2] == [0, 0], "conflicts between banks"
        return list(counts)[::2]

    return run


def vq2_packed(books, shape: tuple[int, int]) -> vq2_codec.Packed:
    """Some codewords have zeros of both signs, one row sums beyond float16."""
    made = []
    for number, (stride, length) in enumerate(books):
        codebook = normal(256, length, dtype=HALF, seed=10 * length + number)
        codebook[::3, ::2], codebook[1::3] = 0.0, torch.where(codebook[1::3] < 0, -0.0, codebook[1::3])
        codebook[5:40] = -0.0
        codes = integers(256, shape[0], shape[1] // stride, seed=stride + number).to(torch.uint8)
        codes[-1] %= 40
        made.append((codes, codebook))
    scales = normal(shape[0], dtype=HALF, seed=3)
    scales[0] = 60_000
    return vq2_codec.Packed(tuple(made), scales, None, shape)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("scheme", FAST)
def test_vq2_bit_for_bit_without_a_conflict(emulated, scheme, dtype):
    packed = vq2_packed(FAST[scheme], (45, 608))
    expected = vq2_codec.dequantize(packed, dtype)
    buffer = torch.full((49, 608), torch.nan, dtype=dtype)
    lookups, stores = emulated(vq2.Linear(packed), 0, buffer[2:47], False)
    assert same(buffer[2:47], expected)
    assert buffer[[0, 1, 47, 48]].isnan().all()  # the neighbours of a slab stay
    assert lookups > 0 < stores
    part = torch.empty(13, 608, dtype=dtype)
    emulated(vq2.Linear(packed), 16, part, False)
    assert same(part, expected[16:29])


@pytest.mark.parametrize("shape", [(1, 16), (3, 32), (16, 48), (17, 256), (33, 272), (1700, 16)], ids=str)
def test_odd_shapes(emulated, shape):
    packed = vq2_packed(FAST["s4l16"], shape)
    for on in (LARGE, SMALL):
        out = torch.empty(shape, dtype=HALF)
        assert emulated(vq2.Linear(packed), 0, out, False, on)[0] > 0
        assert same(out, vq2_codec.dequantize(packed, HALF))


@pytest.mark.parametrize("stored", [HALF, BF16], ids=str)
@pytest.mark.parametrize("layout", AQLM)
def test_aqlm_bit_for_bit(emulated, layout, stored):
    packed = aqlm_packed((45, 552), stored, 1, AQLM[layout])
    out = torch.empty(45, 552, dtype=stored)
    lookups, _ = emulated(aqlm.Linear(packed), 0, out, True)
    assert same(out, aqlm.dequantize(packed, stored))
    assert (lookups > 0) == (layout != "2x8g4")


@pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
@pytest.mark.parametrize("scheme", OTHERS)
def test_other_books_by_the_general_kernel(emulated, scheme, dtype):
    packed = vq2_packed(OTHERS[scheme], (45, 592))
    out = torch.empty(29, 592, dtype=dtype)
    assert emulated(vq2.Linear(packed), 16, out, False) == [0, 0]
    assert same(out, vq2_codec.dequantize(packed, dtype)[16:])


def test_what_else_goes_there(emulated):
    """f32; results of another type than AQLM's codebooks; books that do not fit into shared memory."""
    packed, coded = vq2_packed(FAST["s4l16+s8l16"], (21, 272)), aqlm_packed((21, 272), BF16, 1, AQLM["2x8"])
    for linear, dtype, on, expected in (
        (vq2.Linear(packed), F32, LARGE, vq2_codec.dequantize(packed, F32)),
        (vq2.Linear(packed), HALF, SMALL, vq2_codec.dequantize(packed, HALF)),
        (aqlm.Linear(coded), HALF, LARGE, aqlm.dequantize(coded, HALF)),
    ):
        out = torch.empty(21, 272, dtype=dtype)
        assert emulated(linear, 0, out, isinstance(linear, aqlm.Linear), on) == [0, 0]
        assert same(out, expected)


PACKED = vq2_packed(FAST["s4l16"], (35, 64))
LINEAR = vq2.Linear(copy.deepcopy(PACKED)).put_into_tiles()
OUT, CODEBOOK = torch.empty(19, 64, dtype=HALF), PACKED.books[0][1]
REFUSED = {
    "another width": ({"out": torch.empty(19, 48, dtype=HALF)}, r"must be \[count, 64\]"),
    "half a tile": ({"first": 8}, r"rows 8 \.\. 26 of 35, in tiles of 16"),
    "rows that are not there": ({"first": 32}, r"rows 32 \.\. 50 of 35"),
    "a result of integers": ({"out": OUT.to(torch.int32)}, "out is torch.int32"),
    "two codebooks": ({"codebooks": [CODEBOOK] * 2}, "2 codebooks of 1 books"),
    "a codebook of 100": ({"codebooks": [CODEBOOK[:100]]}, r"a codebook has shape \(100, 16\)"),
    "a codebook of another type": ({"codebooks": [CODEBOOK.float()]}, "codebook is torch.float32"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}  # fmt: skip


test_it_refuses_by_name = refused_by_name(
    vq_dequantize,
    {"matrix": LINEAR.tiles, "codebooks": [CODEBOOK], "first": 16, "out": OUT, "rounded": False},
    REFUSED,
)


def test_the_launcher_refuses_by_name(emulated):
    odd = vq2.Linear(replace(PACKED, books=((PACKED.books[0][0], torch.zeros(4098, dtype=HALF)[2:].view(256, 16)),)))
    with pytest.raises(ValueError, match="vq_dequantize: codebook = 4, bytes past an aligned address"):
        emulated(odd, 0, OUT, False)


def test_bytes():
    assert vq_dequantize_bytes(10, 80, (4, 16), HALF) == 10 * (20 + 5) + 20 + 10 * 80 * 2


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
@pytest.mark.parametrize("scheme", FAST | OTHERS)
def test_vq2_on_a_gpu(scheme, dtype):
    packed = vq2_packed((FAST | OTHERS)[scheme], (1003, 1072))
    expected, linear = vq2_codec.dequantize(packed, dtype), vq2.Linear(packed.to("cuda"))
    linear.tile_()
    for first, count in ((0, 1003), (32, 500)):
        got = linear.dequantized_rows(first, count, dtype, None)
        assert same(got.cpu(), expected[first : first + count])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
@pytest.mark.parametrize("stored", [HALF, BF16], ids=str)
@pytest.mark.parametrize("layout", AQLM)
def test_aqlm_on_a_gpu(layout, stored, dtype):
    packed = aqlm_packed((1003, 1064), stored, 1, AQLM[layout])
    expected, linear = aqlm.dequantize(packed, dtype), aqlm.Linear(packed.to("cuda"))
    linear.tile_()
    for first, count in ((0, 1003), (32, 500)):
        got = linear.dequantized_rows(first, count, dtype, None)
        assert same(got.cpu(), expected[first : first + count])
