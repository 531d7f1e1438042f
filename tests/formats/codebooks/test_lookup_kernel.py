"""vq_gemv: what it refuses; how far tables in f16 are from a 16-bit product; on a GPU, as close to fp64 as that, and
the same bits every time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from localq.formats.codebooks.lookup_kernel import VqBook, VqOperand, vq_gemv, vq_gemv_bytes
from localq.formats.codebooks.rotation import packed_signs, rotate
from localq.kernels.gemv import Norm
from localq.kernels.rmsnorm import rmsnorm
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_checks import DTYPES
from tests.support.kernels.row_operands import RowFormat, RowOperand
from tests.support.kernels.table_checks import TableProductChecks
from tests.support.kernels.vq_operands import SCHEMES, by_tables, make, rounding_of_tables

X = inputs(3, 80, torch.bfloat16)
CODES, FRAGMENTS, SCALES = torch.zeros(320, dtype=torch.uint8), torch.zeros(16, 1, 32, 8).half(), torch.ones(10).half()
SIGNS = torch.zeros(10, dtype=torch.uint8)


def matrix(
    codes=CODES, fragments=FRAGMENTS, scales=SCALES, stride=4, before=0, books=1, columns=80, signs=None
) -> VqOperand:
    return VqOperand((VqBook(codes, fragments, stride, before, 20),) * books, scales, 1.0, 10, columns, signs=signs)


REFUSED = {
    "nine rows": ({"x": inputs(9, 80, torch.float16)}, r"x has shape \(9, 80\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "no book": ({"operands": [VqOperand((), SCALES, 1.0, 10, 80)]}, "0 books"),
    "three books": ({"operands": [matrix(books=3)]}, "3 books, must be 1 or 2"),
    "codes of 16 bits": ({"operands": [matrix(CODES.short())]}, "codes is torch.int16"),
    "codes not in tiles": ({"operands": [matrix(CODES[:200])]}, r"codes has shape \(200,\), must have 320"),
    "another width": ({"operands": [matrix(columns=64)]}, "x has 80 columns, a matrix has 64"),
    "an odd stride": ({"operands": [matrix(stride=5)]}, r"stride = 5, must be one of \(2, 4, 8, 16\)"),
    "books that overlap": ({"operands": [matrix(before=1)]}, "before = 1, must leave room among 20"),
    "long codewords": ({"operands": [matrix(fragments=torch.zeros(16, 3, 32, 8).half())]}, "fragments have shape"),
    "fragments of floats": ({"operands": [matrix(fragments=FRAGMENTS.float())]}, "fragments is torch.float32"),
    "too few scales": ({"operands": [matrix(scales=SCALES[:9])]}, r"scales has shape \(9,\), must have 10"),
    "signs for several rows": ({"operands": [matrix(signs=SIGNS)]}, "x has 3 rows, must have one with signs"),
    "signs of half a block": (
        {"x": X[:1, :72].contiguous(), "operands": [matrix(columns=72, signs=SIGNS[:9])]},
        "x has 72 columns, must have a multiple of 16 with signs",
    ),
    "signs of two rotations": (
        {"x": X[:1], "operands": [matrix(signs=SIGNS), matrix(signs=SIGNS.clone())]},
        "signs of operands differ",
    ),
    "too few signs": ({"x": X[:1], "operands": [matrix(signs=SIGNS[:9])]}, r"signs has shape \(9,\), must have 10"),
    "signs of floats": ({"x": X[:1], "operands": [matrix(signs=SCALES)]}, "signs is torch.float16"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}


test_it_refuses_by_name = refused_by_name(vq_gemv, {"x": X, "operands": [matrix()]}, REFUSED)


def test_bytes():
    assert vq_gemv_bytes(1, 28672, 8192) == 28672 * 2048 + 2 * 28672 + 2 * (28672 + 8192)
    assert vq_gemv_bytes(3, 77, 64, (8, 8)) == 2 * 77 * 8 + 2 * 77 + 6 * (77 + 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_in_f16_are_as_good_as_a_16_bit_product(scheme, dtype):
    """What the kernel rounds besides its sums, held to the tolerance that the kernel is held to on a GPU."""
    operand, x = make((331, 2128), SCHEMES[scheme], seed=7), inputs(8, 2128, dtype)
    x[5] *= 2.0**-13  # small as a whole: what counts is the size within a row
    assert_as_good_as_naive(by_tables(operand, x)[0].to(dtype), x, operand.dense)


def of_scheme(scheme: str) -> RowFormat:
    def made(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: str) -> RowOperand:
        operand = make(shape, SCHEMES[scheme], seed, device, scales=dtype, together=scheme == "s8l8+s8l8")
        return RowOperand(operand.matrix, operand.dense, partial(rounding_of_tables, operand))

    return RowFormat(made, vq_gemv, 16)


@pytest.mark.cuda
class TestOverlapping(TableProductChecks):
    format = of_scheme("s4l16")


@pytest.mark.cuda
class TestTwoBooksInOneTensor(TableProductChecks):
    format = of_scheme("s8l8+s8l8")


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme, rows):
    for shape in ((577, 576), (4099, 2128)):
        operand = make(shape, SCHEMES[scheme], 5, "cuda")
        x = inputs(rows, shape[1], torch.float16, "cuda")
        assert_as_good_as_naive(vq_gemv(x, [operand.matrix]), x, operand.dense)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [48, 576, 1536, 2560, 5376, 8192, 13_824, 28_672])
def test_it_rotates_x_as_a_launch_before_it_would(columns, dtype):
    """The same bits, so that a step is the same whoever rotates; with a norm too, which both take before."""
    for number, out in enumerate((33, 1040, 4099)):
        operand, x = make((out, columns), SCHEMES["s4l16"], out, "cuda"), inputs(1, columns, dtype, "cuda")
        signs = packed_signs(torch.rand(columns, generator=torch.Generator().manual_seed(out)) < 0.5).cuda()
        rotated = replace(operand.matrix, signs=signs)
        weight = torch.rand(columns, generator=torch.Generator().manual_seed(out + 1)) + 0.5
        norm = Norm(weight.to(dtype).cuda(), 1e-5) if number else None
        got = vq_gemv(x, [rotated], norm=norm, out=torch.empty(1, out, device="cuda"))
        turned = rotate(x, signs) if norm is None else rotate(rmsnorm(x, norm, out=torch.empty_like(x)), signs)
        assert_as_good_as_naive(got.to(dtype), turned, operand.dense)
        again = vq_gemv(x, [rotated], norm=norm, out=torch.empty(1, out, device="cuda"))
        assert torch.equal(bits(got), bits(again))
        if norm is None:
            before = vq_gemv(turned, [operand.matrix], out=torch.empty(1, out, device="cuda"))
            assert torch.equal(bits(got), bits(before))
