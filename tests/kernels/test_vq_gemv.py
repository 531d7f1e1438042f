"""vq_gemv: what it refuses; how far tables in f16 are from a 16-bit product; on a GPU, as close to fp64 as that, and
the same bits every time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from nf4_operands import assert_as_good_as_naive, bits, inputs
from row_checks import DTYPES, RowProductChecks
from row_operands import RowFormat, RowOperand
from vq_operands import SCHEMES, by_tables, make, rounding_of_tables

from localq.kernels.vq import VqBook, VqMatrix, vq_gemv, vq_gemv_bytes

X = inputs(3, 80, torch.bfloat16)
CODES, FRAGMENTS, SCALES = torch.zeros(320, dtype=torch.uint8), torch.zeros(16, 1, 32, 8).half(), torch.ones(10).half()


def matrix(codes=CODES, fragments=FRAGMENTS, scales=SCALES, stride=4, before=0, books=1, columns=80) -> VqMatrix:
    return VqMatrix((VqBook(codes, fragments, stride, before, 20),) * books, scales, 1.0, 10, columns)


REFUSED = {
    "nine rows": ({"x": inputs(9, 80, torch.float16)}, r"x has shape \(9, 80\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"matrices": []}, "0 matrices"),
    "no book": ({"matrices": [VqMatrix((), SCALES, 1.0, 10, 80)]}, "0 books"),
    "three books": ({"matrices": [matrix(books=3)]}, "3 books, must be 1 or 2"),
    "codes of 16 bits": ({"matrices": [matrix(CODES.short())]}, "codes is torch.int16"),
    "codes not in tiles": ({"matrices": [matrix(CODES[:200])]}, r"codes has shape \(200,\), must have 320"),
    "another width": ({"matrices": [matrix(columns=64)]}, "x has 80 columns, a matrix has 64"),
    "an odd stride": ({"matrices": [matrix(stride=5)]}, r"stride = 5, must be one of \(2, 4, 8, 16\)"),
    "books that overlap": ({"matrices": [matrix(before=1)]}, "before = 1, must leave room among 20"),
    "long codewords": ({"matrices": [matrix(fragments=torch.zeros(16, 3, 32, 8).half())]}, "fragments have shape"),
    "fragments of floats": ({"matrices": [matrix(fragments=FRAGMENTS.float())]}, "fragments is torch.float32"),
    "too few scales": ({"matrices": [matrix(scales=SCALES[:9])]}, r"scales has shape \(9,\), must have 10"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_by_name(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        vq_gemv(**{"x": X, "matrices": [matrix()], **changes})


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


class VqProductChecks(RowProductChecks):
    """What differs: tables are rounded to f16, and a row that is not finite becomes NaN."""

    @pytest.mark.parametrize("rows", [1, 8])
    def test_f32_results_have_the_error_of_f32_sums(self, rows):
        """Of f16 tables: each of the entries rounds by at most 2^-11 of itself, which add up like steps of a walk."""
        operand = self.format.make((1003, 4096), torch.float16, 2, "cuda")
        x = inputs(rows, 4096, torch.float16, "cuda")
        got = self.multiply(operand, x, out=torch.full((rows, 1003), torch.nan, device="cuda"))
        assert_as_good_as_naive(got, x, operand.dense)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(37, 640), (130, 2128)], ids=str)
    def test_single_columns_come_out_exactly(self, shape, dtype):
        """x = one unit vector per row picks columns of W: sums of a few values of f16."""
        operand = self.format.make(shape, dtype, 9, "cuda")
        for first in range(0, shape[1], 8):
            x = torch.eye(shape[1], dtype=dtype, device="cuda")[first : first + 8]
            got = self.multiply(operand, x, out=torch.empty(8, shape[0], device="cuda"))
            expected = operand.dense[:, first : first + 8].T
            assert ((got - expected).abs() <= 2e-6 * operand.dense.abs().max()).all()

    def test_a_row_does_not_depend_on_the_others(self):
        """Of the same number of rows: what they are."""
        operand = self.format.make((257, 1216), torch.bfloat16, 0, "cuda")
        x = inputs(8, 1216, torch.bfloat16, "cuda")
        together, turned = self.multiply(operand, x), self.multiply(operand, x.flip(0))
        assert torch.equal(bits(turned.flip(0)), bits(together))

    @pytest.mark.parametrize("value", [torch.inf, torch.nan])
    def test_what_is_not_finite_stays_in_its_row(self, value):
        operand = self.format.make((99, 1088), torch.float16, 0, "cuda")
        x = inputs(5, 1088, torch.float16, "cuda")
        clean = self.multiply(operand, x)
        x[2, 1085], x[4, 70] = value, value
        got = self.multiply(operand, x)
        assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
        assert got[[2, 4]].isnan().all()


@pytest.mark.cuda
class TestOverlapping(VqProductChecks):
    format = of_scheme("s4l16")


@pytest.mark.cuda
class TestTwoBooksInOneTensor(VqProductChecks):
    format = of_scheme("s8l8+s8l8")


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme, rows):
    for shape in ((577, 576), (4099, 2128)):
        operand = make(shape, SCHEMES[scheme], 5, "cuda")
        x = inputs(rows, shape[1], torch.float16, "cuda")
        assert_as_good_as_naive(vq_gemv(x, [operand.matrix]), x, operand.dense)
