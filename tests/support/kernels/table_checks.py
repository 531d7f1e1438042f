"""What a product that rounds more than its result, tables to f16 or x to bits, must do on a GPU in any format."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.row_checks import DTYPES, RowProductChecks


class TableProductChecks(RowProductChecks):
    """What differs: tables are rounded to f16, or x to bits, and a row that is not finite becomes NaN."""

    @pytest.mark.parametrize("rows", [1, 8])
    def test_f32_results_have_the_error_of_f32_sums(self, rows):
        """Of f16 tables: each of the entries rounds by at most 2^-11 of itself, which add up like steps of a walk. Of
        bits: each value of x by at most 2^-15 of the largest of 128."""
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
