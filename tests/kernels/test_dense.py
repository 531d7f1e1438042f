"""dense_gemv: what it refuses; on a GPU, as close to fp64 as a 16-bit product is, and the same bits every time."""

from __future__ import annotations

import pytest
import torch

from localq.kernels.dense import DenseOperand, dense_gemv, dense_gemv_bytes
from localq.kernels.gemv import Norm
from tests.support.kernels.nf4_operands import inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_checks import RowProductChecks
from tests.support.kernels.row_operands import DENSE

X = inputs(3, 72, torch.float16)
WEIGHT = torch.ones(10, 72, dtype=torch.float16)
REFUSED = {
    "nine rows": ({"x": inputs(9, 72, torch.float16)}, r"x has shape \(9, 72\)"),
    "a vector": ({"x": X[0]}, r"x has shape \(72,\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "four matrices": ({"operands": [DenseOperand(WEIGHT)] * 4}, "4 matrices"),
    "weights of another type": ({"operands": [DenseOperand(WEIGHT.bfloat16())]}, "weights is torch.bfloat16"),
    "weights of another width": (
        {"operands": [DenseOperand(WEIGHT[:, :64])]},
        r"a matrix has shape \(10, 64\), must be \[out, 72\]",
    ),
    "weights transposed": ({"operands": [DenseOperand(torch.ones(72, 10).half().T)]}, "weights has strides"),
    "columns that are no loads": (
        {"x": X[:, :12].contiguous(), "operands": [DenseOperand(WEIGHT[:, :12])]},
        "multiple of 8",
    ),
    "out of another size": ({"out": torch.empty(3, 9, dtype=torch.float16)}, "out has shape"),
    "a norm of three rows": ({"norm": Norm(torch.ones(72).half(), 1e-5)}, "a norm in the prologue needs 1"),
    "all on the CPU": ({}, "weights are on cpu, must be on a CUDA device"),
}


test_it_refuses_by_name = refused_by_name(dense_gemv, {"x": X, "operands": [DenseOperand(WEIGHT)]}, REFUSED)


def test_bytes():
    assert dense_gemv_bytes(1, 4096, 14336) == 2 * 4096 * 14336 + 2 * (4096 + 14336)


@pytest.mark.cuda
class TestOnTheDevice(RowProductChecks):
    format = DENSE

    def test_unaligned_tensors_are_named(self):
        weight = torch.zeros(3 * 64 + 1, dtype=torch.float16, device="cuda")[1:].view(3, 64)
        with pytest.raises(ValueError, match="dense_gemv: weights = 2, bytes past"):
            dense_gemv(torch.zeros(1, 64, dtype=torch.float16, device="cuda"), [DenseOperand(weight)])
