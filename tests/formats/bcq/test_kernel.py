"""bcq_gemv and bcq_dequantize: what they refuse; how far x in bits is from a 16-bit product; on a GPU, as close to
fp64 as that, the same bits every time, and weights bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from localq.formats import bcq
from localq.formats.bcq.kernel import BcqOperand, bcq_dequantize, bcq_dequantize_bytes, bcq_gemv, bcq_gemv_bytes
from tests.support.kernels.bcq_operands import by_bits, make, operand_of, random_packed, rounding_of_bits
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_checks import DTYPES
from tests.support.kernels.row_operands import RowFormat, RowOperand
from tests.support.kernels.table_checks import TableProductChecks

X = inputs(3, 80, torch.bfloat16)
CODES, SCALES = torch.zeros(16 * 2 * 16, dtype=torch.uint8), torch.zeros(16 * 2 * 2).half()


def matrix(codes=CODES, scales=SCALES, planes=2, zero=False, group=64, columns=80) -> BcqOperand:
    return BcqOperand(codes, scales, planes, zero, group, 10, columns)


REFUSED = {
    "nine rows": ({"x": inputs(9, 80, torch.float16)}, r"x has shape \(9, 80\)"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "another width": ({"operands": [matrix(columns=64)]}, "x has 80 columns, a matrix has 64"),
    "six planes": ({"operands": [matrix(planes=6)]}, "planes = 6, must be from 1 to 5"),
    "an odd group": ({"operands": [matrix(group=48)]}, "group = 48 of 80 columns"),
    "a group beyond the row": ({"operands": [matrix(group=128)]}, "group = 128 of 80 columns"),
    "codes not in tiles": ({"operands": [matrix(CODES[:200])]}, r"codes has shape \(200,\), must have 512"),
    "scales without the zero point": ({"operands": [matrix(zero=True)]}, r"scales has shape \(64,\), must have 96"),
    "scales of floats": ({"operands": [matrix(scales=SCALES.float())]}, "scales is torch.float32"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}


test_it_refuses_by_name = refused_by_name(bcq_gemv, {"x": X, "operands": [matrix()]}, REFUSED)


OUT = torch.empty(10, 80, dtype=torch.float16)
NO_WEIGHTS = {
    "another width": ({"out": OUT[:, :72]}, r"must be \[count, 80\]"),
    "half a tile": ({"first": 8, "out": OUT[:2]}, r"rows 8 \.\. 9 of 10, in tiles of 16"),
    "a result of floats": ({"out": OUT.float()}, "out is torch.float32"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}


test_weights_are_refused_by_name = refused_by_name(
    bcq_dequantize, {"matrix": matrix(), "first": 0, "out": OUT}, NO_WEIGHTS
)


def test_bytes():
    assert bcq_gemv_bytes(1, 10, 1024, 3) == 10 * (3 * 128 + 2 * 3 * 8) + 2 * (10 + 1024)
    assert bcq_gemv_bytes(0, 10, 80, 2, 64, 3) == 10 * (2 * 10 + 2 * 3 * 2)
    assert bcq_dequantize_bytes(10, 1024, 3, 128) == 10 * (3 * 128 + 3 * 16) + 2 * 10 * 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", [1, 2, 3, 5])
def test_x_in_bits_is_as_good_as_a_16_bit_product(planes, dtype):
    """What the kernel rounds besides its sums, held to the tolerance that the kernel is held to on a GPU."""
    operand, x = make((331, 2128), planes, 128, zero_point=planes == 3, seed=7), inputs(8, 2128, dtype)
    x[5] *= 2.0**-13  # small as a whole: what counts is the size within a row
    assert_as_good_as_naive(by_bits(operand, x)[0].to(dtype), x, operand.dense)


def of_kind(planes: int, group: int, zero_point: bool = False) -> RowFormat:
    def made(shape: tuple[int, int], dtype: torch.dtype, seed: int, device: str) -> RowOperand:
        operand = make(shape, planes, group if group < shape[1] else 0, zero_point, seed, device)
        return RowOperand(operand.matrix, operand.dense, partial(rounding_of_bits, operand))

    return RowFormat(made, bcq_gemv, 16)


@pytest.mark.cuda
class TestThreePlanes(TableProductChecks):
    format = of_kind(3, 128)


@pytest.mark.cuda
class TestSmallGroupsWithZeroPoints(TableProductChecks):
    format = of_kind(2, 32, zero_point=True)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512, 0])
def test_every_group(group, rows):
    for planes, shape in ((1, (577, 576)), (4, (4099, 2128)), (5, (256, 3072))):
        operand = make(shape, planes, group, zero_point=planes == 4, seed=5, device="cuda")
        x = inputs(rows, shape[1], torch.float16, "cuda")
        allowed = partial(rounding_of_bits, operand, x)
        assert_as_good_as_naive(bcq_gemv(x, [operand.matrix]), x, operand.dense, beyond=allowed)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("planes", "group"), [(1, 0), (3, 128), (5, 32)])
def test_weights_on_a_gpu(planes, group, dtype):
    packed = random_packed((1003, 2136), planes, group, planes > 1)
    expected, linear = bcq.dequantize(packed, dtype), bcq.Linear(packed.to("cuda"))
    linear.tile_()
    for first, count in ((0, 1003), (32, 500)):
        got = linear.dequantized_rows(first, count, dtype, None)
        assert torch.equal(bits(got.cpu()), bits(expected[first : first + count]))


@pytest.mark.cuda
def test_solving_gives_the_same_bits_on_a_gpu():
    weight = torch.randn(64, 1096, generator=torch.Generator().manual_seed(1))
    for zero_point in (False, True):
        here, there = (bcq.quantize(weight.to(device), 3, 128, zero_point).to("cpu") for device in ("cpu", "cuda"))
        assert torch.equal(here.codes, there.codes)
        assert torch.equal(here.scales, there.scales)


@pytest.mark.cuda
def test_a_linear_of_few_and_of_many_rows():
    operand = operand_of(random_packed((321, 1360), 3, 128, True))
    linear = bcq.Linear(operand.packed.to("cuda"), torch.randn(321).half().cuda())
    assert linear.tile_().operand() is not None
    for rows in (1, 8, 9, 70):
        x = inputs(rows, 1360, torch.float16, "cuda")
        assert_as_good_as_naive(linear(x), x, operand.dense.cuda(), linear.bias)
