"""rowlut_gemv, rowlut_dequantize: what they refuse; on a GPU, as near to fp64 as 16 bit, and weights bit for bit."""

from __future__ import annotations

import pytest
import torch

from localq.formats.squeezellm.kernel import (  # fmt: skip
    RowLutOperand,
    rowlut_dequantize,
    rowlut_dequantize_bytes,
    rowlut_gemv,
    rowlut_gemv_bytes,
)
from localq.kernels import gemv
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_checks import DTYPES, RowProductChecks
from tests.support.kernels.row_operands import ROWLUT, ROWLUT_TILES, rowlut_weights

X = inputs(3, 96, torch.bfloat16)
CODES, TABLE = torch.ones(10, 48, dtype=torch.uint8), torch.ones(10, 16).half()
TILES = torch.ones(8, 64, dtype=torch.uint8)
REFUSED = {
    "nine rows": ({"x": inputs(9, 96, torch.float16)}, r"x has shape \(9, 96\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "codes with a sign": ({"operands": [RowLutOperand(CODES.to(torch.int8), TABLE)]}, "codes is torch.int8"),
    "codes of another width": (
        {"operands": [RowLutOperand(CODES[:, :32].contiguous(), TABLE)]},
        "x has 96 columns, a matrix has 64",
    ),
    "columns that are no loads": ({"operands": [RowLutOperand(CODES[:, :20], TABLE)]}, "multiple of 32"),
    "codes of one row": ({"operands": [RowLutOperand(CODES[0], TABLE)]}, r"codes have shape \(48,\)"),
    "too few values": ({"operands": [RowLutOperand(CODES, TABLE[:, :15])]}, r"table has shape \(10, 15\)"),
    "values of floats": ({"operands": [RowLutOperand(CODES, TABLE.float())]}, "table is torch.float32"),
    "tiles of some rows": ({"operands": [RowLutOperand(CODES, TABLE, True)]}, r"\[10, 48\] cannot be tiled"),
    "tiles of short steps": ({"operands": [RowLutOperand(CODES[:8], TABLE[:8], True)]}, r"\[8, 48\] cannot be tiled"),
    "tiles beside rows": (
        {
            "x": inputs(1, 128, torch.float16),
            "operands": [RowLutOperand(TILES, TABLE[:8], each) for each in (True, False)],
        },
        "some matrices are tiled",
    ),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}
NOT_WRITTEN = {
    "out of another width": (0, torch.empty(4, 95), r"out has shape \(4, 95\)"),
    "rows that are not there": (7, torch.empty(4, 96), "rows 7 .. 10 of 10"),
    "integers": (0, torch.empty(4, 96, dtype=torch.int32), "out is torch.int32"),
    "on the CPU": (0, torch.empty(4, 96), "codes are on cpu"),
}


test_it_refuses_by_name = refused_by_name(rowlut_gemv, {"x": X, "operands": [RowLutOperand(CODES, TABLE)]}, REFUSED)


@pytest.mark.parametrize("case", NOT_WRITTEN)
def test_unpacking_refuses_by_name(case):
    first, out, message = NOT_WRITTEN[case]
    with pytest.raises(ValueError, match=message):
        rowlut_dequantize(RowLutOperand(CODES, TABLE), first, out)


def test_bytes():
    assert rowlut_gemv_bytes(1, 11008, 4096) == 11008 * 2048 + 32 * 11008 + 2 * (11008 + 4096)
    assert rowlut_dequantize_bytes(10, 96, torch.float32) == CODES.nbytes + TABLE.nbytes + 4 * 960


class RowLutChecks(RowProductChecks):
    @pytest.mark.parametrize("rows", [1, 4, 8])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("columns", [2048, 5120, 8192, 12288])
    def test_whole_tiles_of_the_widths_of_models(self, columns, dtype, rows):
        """One or two tables, x in shared memory or not, one item of a warp or more; ragged tiles are above."""
        out, _ = self.least(4100, columns)
        operand = self.format.make((out, columns), dtype, columns, "cuda")
        x = inputs(rows, columns, dtype, "cuda")
        got = self.multiply(operand, x, out=torch.full((rows, out), torch.nan, device="cuda"))
        wide, dense = x.double(), operand.dense.double()
        assert ((got.double() - wide @ dense.T).abs() <= 1e-5 * (wide.abs() @ dense.abs().T)).all()

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
    @pytest.mark.parametrize("shape", [(1, 8), (33, 1048), (70, 4096)], ids=str)
    def test_weights_come_out_bit_for_bit(self, shape, dtype):
        shape = shape if self.format is ROWLUT else self.least(*shape)  # 8 columns do, where nothing is multiplied
        matrix = self.format.make(shape, dtype, 4, "cuda").matrix
        expected = rowlut_weights(matrix, dtype)
        for first, count in ((0, shape[0]), (shape[0] // 3, shape[0] - shape[0] // 3), (shape[0] // 2, 1)):
            out = torch.full((count, shape[1]), torch.nan, dtype=dtype, device="cuda")
            assert torch.equal(rowlut_dequantize(matrix, first, out), expected[first : first + count])


@pytest.mark.cuda
class TestInTiles(RowLutChecks):
    format = ROWLUT_TILES

    @pytest.mark.parametrize("outs", [(4104,), (2048, 264, 520), (40, 8, 24)], ids=str)
    @pytest.mark.parametrize("rows", [1, 2, 8])
    def test_the_same_bits_as_row_by_row(self, rows, outs):
        """Whether there are as many groups of 8 rows as blocks or not; 8 and more tiles of a block are above."""
        x = inputs(rows, 4224, torch.float16, "cuda")
        results = [
            form.gemv(x, [form.make((out, 4224), torch.float16, out, "cuda").matrix for out in outs])
            for form in (ROWLUT, ROWLUT_TILES)
        ]
        assert torch.equal(*map(bits, results))


@pytest.mark.cuda
class TestOnTheDevice(RowLutChecks):
    format = ROWLUT

    @pytest.mark.parametrize("value", [torch.inf, torch.nan])
    def test_in_bf16_what_is_not_finite_makes_its_row_nan(self, value):
        operand = self.format.make((99, 1088), torch.bfloat16, 0, "cuda")
        x = inputs(5, 1088, torch.bfloat16, "cuda")
        clean = self.multiply(operand, x)
        x[2, 1085], x[4, 70] = value, value
        got = self.multiply(operand, x)
        assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
        assert got[[2, 4]].isnan().all()

    def test_rows_of_zeros_and_of_the_least_numbers(self):
        operand = self.format.make((99, 1088), torch.bfloat16, 0, "cuda")
        x = torch.zeros(3, 1088, dtype=torch.bfloat16, device="cuda")
        x[1, 5], x[2] = 1e-38, inputs(1, 1088, torch.bfloat16, "cuda")[0] * 1e-20
        got = self.multiply(operand, x, out=torch.empty(3, 99, device="cuda"))
        assert not got[0].any()
        assert (got[1].abs() <= 1e-30).all()
        exact = x[2].double() @ operand.dense.double().T
        assert ((got[2] - exact).abs() <= 1e-4 * (x[2].double().abs() @ operand.dense.double().abs().T)).all()

    def test_x_of_any_width_is_taken_without_a_norm(self):
        """163,840 columns: no shared memory holds a row of them."""
        for dtype in DTYPES:
            operand = self.format.make((35, 163840), dtype, 0, "cuda")
            x = inputs(2, 163840, dtype, "cuda")
            assert_as_good_as_naive(self.multiply(operand, x), x, operand.dense)
        norm = gemv.Norm(torch.ones(163840, dtype=torch.bfloat16, device="cuda"), 1e-5)
        with pytest.raises(ValueError, match="too large for a norm"):
            self.multiply(operand, x[:1], norm=norm)

    def test_unaligned_tensors_are_named(self):
        codes = torch.zeros(3 * 32 + 1, dtype=torch.uint8, device="cuda")[1:].view(3, 32)
        matrix = RowLutOperand(codes, torch.ones(3, 16, device="cuda").half())
        with pytest.raises(ValueError, match="rowlut_gemv: codes = 1, bytes past"):
            rowlut_gemv(torch.zeros(1, 64, dtype=torch.float16, device="cuda"), [matrix])
