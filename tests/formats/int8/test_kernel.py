"""int8_gemv: what it refuses; on a GPU, as close to fp64 as a 16-bit product is, and the same bits every time."""

from __future__ import annotations

import pytest
import torch

from localq.formats.int8.kernel import Int8Operand, int8_gemv, int8_gemv_bytes
from tests.support.kernels.nf4_operands import inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_checks import RowProductChecks
from tests.support.kernels.row_operands import INT8

X = inputs(3, 80, torch.bfloat16)
CODES, SCALES = torch.ones(10, 80, dtype=torch.int8), torch.ones(10)
REFUSED = {
    "nine rows": ({"x": inputs(9, 80, torch.float16)}, r"x has shape \(9, 80\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "codes without a sign": ({"operands": [Int8Operand(CODES.to(torch.uint8), SCALES)]}, "codes is torch.uint8"),
    "codes of another width": ({"operands": [Int8Operand(CODES[:, :64], SCALES)]}, r"must be \[out, 80\] as x is"),
    "too few scales": ({"operands": [Int8Operand(CODES, SCALES[:9])]}, r"scales has shape \(9,\), must have 10"),
    "scales of halves": ({"operands": [Int8Operand(CODES, SCALES.half())]}, "scales is torch.float16"),
    "columns that are no loads": (
        {"x": X[:, :24].contiguous(), "operands": [Int8Operand(CODES[:, :24], SCALES)]},
        "multiple of 16",
    ),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}


test_it_refuses_by_name = refused_by_name(int8_gemv, {"x": X, "operands": [Int8Operand(CODES, SCALES)]}, REFUSED)


def test_bytes():
    assert int8_gemv_bytes(1, 128256, 4096) == 128256 * 4096 + 4 * 128256 + 2 * (128256 + 4096)


@pytest.mark.cuda
class TestOnTheDevice(RowProductChecks):
    format = INT8

    def test_unaligned_tensors_are_named(self):
        codes = torch.zeros(3 * 64 + 1, dtype=torch.int8, device="cuda")[1:].view(3, 64)
        matrix = Int8Operand(codes, torch.ones(3, device="cuda"))
        with pytest.raises(ValueError, match="int8_gemv: codes = 1, bytes past"):
            int8_gemv(torch.zeros(1, 64, dtype=torch.float16, device="cuda"), [matrix])
