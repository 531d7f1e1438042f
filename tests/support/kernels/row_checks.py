"""What a product whose weights lie row by row must do on a GPU, whatever their format."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from localq.kernels import gemv
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.row_operands import RowFormat, biased, normed

DTYPES = [torch.float16, torch.bfloat16]
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


class RowProductChecks:
    """Subclassed by each test file, which names the format."""

    format: RowFormat

    def least(self, rows, columns):
        """The least shape from there on that the format takes."""
        return self.format.shape(rows, columns)

    def multiply(self, operand, x, **extras):
        return self.format.gemv(x, [operand.matrix], **extras)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("number", range(10))
    def test_it_is_as_good_as_a_16_bit_product(self, number, dtype):
        shape = self.format.shapes()[number]
        operand = self.format.make(shape, dtype, shape[0], "cuda")
        x = inputs(24, shape[1], dtype, "cuda")  # so many that even one output gives a largest error worth comparing
        for rows in (1, 3, 8):
            results = [self.multiply(operand, part) for part in x.split(rows)]
            assert results[0].shape == (rows, shape[0])
            assert results[0].dtype == dtype
            assert_as_good_as_naive(torch.cat(results), x, operand.dense, beyond=partial(operand.rounded, x))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rows", range(1, 9))
    def test_every_number_of_rows_with_bias(self, rows, dtype):
        out, columns = self.least(321, 1360)
        operand = self.format.make((out, columns), dtype, rows, "cuda")
        bias = 5 * torch.randn(out, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)).to(dtype)
        x = inputs(rows, columns, dtype, "cuda", seed=rows)
        assert_as_good_as_naive(self.format.gemv(x, biased([operand.matrix], [bias])), x, operand.dense, bias)

    @pytest.mark.parametrize("rows", [1, 8])
    def test_f32_results_have_the_error_of_f32_sums(self, rows):
        out, columns = self.least(1003, 4096)
        operand = self.format.make((out, columns), torch.float16, 2, "cuda")
        x = inputs(rows, columns, torch.float16, "cuda")
        got = self.multiply(operand, x, out=torch.full((rows, out), torch.nan, device="cuda"))
        exact = x.double() @ operand.dense.double().T
        size = x.double().abs() @ operand.dense.double().abs().T
        assert ((got.double() - exact).abs() <= 1e-5 * size).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(37, 640), (130, 2128)], ids=str)
    def test_single_columns_come_out_exactly(self, shape, dtype):
        """x = one unit vector per row picks columns of W: a wrong byte, lane or scale cannot hide in a sum."""
        out, columns = self.least(*shape)
        operand = self.format.make((out, columns), dtype, 9, "cuda")
        for first in range(0, columns, 8):
            x = torch.eye(columns, dtype=dtype, device="cuda")[first : first + 8]
            got = self.multiply(operand, x, out=torch.empty(8, out, device="cuda"))
            assert torch.equal(got, operand.dense[:, first : first + 8].T)

    def test_a_row_does_not_depend_on_the_others(self):
        shape = self.least(257, 1216)
        operand = self.format.make(shape, torch.bfloat16, 0, "cuda")
        x = inputs(8, shape[1], torch.bfloat16, "cuda")
        together = self.multiply(operand, x)
        for row in range(8):
            assert torch.equal(bits(self.multiply(operand, x[row : row + 1])), bits(together[row : row + 1]))

    @pytest.mark.parametrize("value", [torch.inf, torch.nan])
    def test_what_is_not_finite_stays_in_its_row(self, value):
        shape = self.least(99, 1088)
        operand = self.format.make(shape, torch.float16, 0, "cuda")
        x = inputs(5, shape[1], torch.float16, "cuda")
        clean = self.multiply(operand, x)
        x[2, 1085], x[4, 70] = value, value
        got = self.multiply(operand, x)
        assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
        for row, column in ((2, 1085), (4, 70)):
            expected = value * operand.dense[:, column]  # inf * 0 is NaN
            assert torch.equal(got[row].isnan(), expected.isnan())
            assert torch.equal(got[row].float().nan_to_num(0.0), expected.nan_to_num(0.0))

    def test_out_is_filled_and_its_neighbours_stay(self):
        shape = self.least(203, 704)
        operand = self.format.make(shape, torch.bfloat16, 0, "cuda")
        buffer = torch.full((5, shape[0]), torch.nan, dtype=torch.bfloat16, device="cuda")
        out = buffer[1:4]
        assert self.multiply(operand, inputs(3, shape[1], torch.bfloat16, "cuda"), out=out) is out
        assert torch.isfinite(out).all()
        assert buffer[[0, 4]].isnan().all()

    @pytest.mark.parametrize("rows", [1, 7])
    def test_20_runs_give_the_same_bits(self, rows):
        shape = self.least(9001, 1616)
        operand = self.format.make(shape, torch.float16, 0, "cuda")
        x = inputs(rows, shape[1], torch.float16, "cuda")
        first = self.multiply(operand, x)
        for _ in range(20):
            assert torch.equal(bits(self.multiply(operand, x)), bits(first))

    def test_a_captured_graph_reads_what_is_there_at_replay(self):
        shape = self.least(321, 576)
        operand = self.format.make(shape, torch.float16, 0, "cuda")
        x, later = (inputs(4, shape[1], torch.float16, "cuda", seed=seed) for seed in (1, 2))
        expected = self.multiply(operand, later)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = self.multiply(operand, x)
        x.copy_(later)
        for _ in range(3):
            got.fill_(torch.nan)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(got), bits(expected))

    def test_a_chain_of_launches_reads_what_the_one_before_wrote(self):
        """Each launch may begin while the one before still runs: the weights come early, x must not."""
        operand = self.format.make((1024, 1024), torch.float16, 5, "cuda")
        x = inputs(1, 1024, torch.float16, "cuda")
        norm = gemv.Norm(torch.ones(1024, dtype=torch.float16, device="cuda"), 1e-5)  # keeps the chain finite
        chain, apart = x, x
        for _ in range(8):
            chain = self.multiply(operand, chain, norm=norm)
        for _ in range(8):
            apart = self.multiply(operand, apart, norm=norm)
            torch.cuda.synchronize()
        assert torch.isfinite(chain).all()
        assert torch.equal(bits(chain), bits(apart))

    @pytest.mark.parametrize("kind", ["plain", "offset"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("columns", [576, 4096])
    def test_norm_three_matrices_biases_and_residual_in_one_launch(self, columns, dtype, kind):
        shapes = [self.least(out, columns) for out in (577, 96, 33)]
        outs, columns = [out for out, _ in shapes], shapes[0][1]
        operands = [self.format.make(shape, dtype, shape[0], "cuda") for shape in shapes]
        generator = torch.Generator("cuda").manual_seed(3)
        x = inputs(1, columns, dtype, "cuda", seed=columns)
        weight = torch.rand(columns, device="cuda", generator=generator) + 0.5
        norm = gemv.Norm(weight if kind == "offset" else weight.to(dtype), 1e-5)
        bias = torch.randn(sum(outs), device="cuda", generator=generator).to(dtype)
        residual = torch.randn(1, sum(outs), device="cuda", generator=generator).to(dtype)
        matrices = [operand.matrix for operand in operands]
        got = self.format.gemv(x, biased(matrices, bias.split(outs)), norm=norm, residual=residual)
        dense = torch.cat([operand.dense for operand in operands])
        # The residual enters before the one rounding, so the sum as a whole is what a naive product with a bias gives.
        assert_as_good_as_naive(got, normed(x, norm), dense, bias=bias.float() + residual[0].float())

    @pytest.mark.parametrize("activation", list(ACTIVATIONS))
    @pytest.mark.parametrize("rows", [1, 5])
    def test_gate_and_up_in_one_launch(self, rows, activation):
        width, columns = self.least(1055, 1088)
        operands = [self.format.make((width, columns), torch.float16, seed, "cuda") for seed in (1, 2)]
        x = inputs(rows, columns, torch.float16, "cuda") / 32
        biases = [torch.randn(width, device="cuda").half() for _ in operands]
        out = torch.full((rows, width), torch.nan, device="cuda")
        got = self.format.gemv(
            x, biased([operand.matrix for operand in operands], biases), activation=activation, out=out
        )
        wide = [x.double() @ each.dense.double().T + bias.double() for each, bias in zip(operands, biases, strict=True)]
        exact = ACTIVATIONS[activation](wide[0]) * wide[1]
        halves = [
            torch.nn.functional.linear(x, each.dense.half(), bias) for each, bias in zip(operands, biases, strict=True)
        ]
        naive = ((ACTIVATIONS[activation](halves[0]) * halves[1]).double() - exact).abs().max()
        assert (got.double() - exact).abs().max() <= 2 * naive

    def test_out_may_be_the_residual(self):
        out, columns = self.least(321, 640)
        operand = self.format.make((out, columns), torch.bfloat16, 0, "cuda")
        x, stream = inputs(1, columns, torch.bfloat16, "cuda"), torch.randn(1, out, device="cuda").bfloat16()
        expected = self.multiply(operand, x, residual=stream)
        assert torch.equal(bits(self.multiply(operand, x, residual=stream, out=stream)), bits(expected))
