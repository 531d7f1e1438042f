"""int4_gemv and int4_dequantize: what they refuse; on a GPU, as close to fp64 as a 16-bit product, bit for bit, and the
same bits every time. What they do without a GPU: test_kernel_emulated.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from localq.formats.cases import BY_OP
from localq.formats.int4 import codec as int4_codec
from localq.formats.int4.kernel import (
    WIDEST_ORDER,
    Int4Operand,
    int4_dequantize,
    int4_dequantize_bytes,
    int4_gemv,
    int4_gemv_bytes,
    reads,
)
from localq.kernels import gemv
from tests.support.kernels.int4_operands import Int4Sample, make
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_operands import biased, normed

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = [HALF, BF16]
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
# Column blocks 1, 5, 8, 9, 17, 33, 65, 448: chunks of eight that are full, partly full and missing. Outputs: one tile;
# more than a GPU holds at a time; x too wide for shared memory.
SHAPES = BY_OP["int4_gemv"].shapes
GROUPS = (32, 64, 128)
X, MATRIX = inputs(3, 128, BF16), make((32, 128), 64).matrix
ELSEWHERE = Int4Operand(MATRIX.codes.to("meta"), MATRIX.scales.to("meta"), MATRIX.zeros.to("meta"), None, 64)
REFUSED = {
    "nine rows": ({"x": inputs(9, 128, HALF)}, r"x has shape \(9, 128\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "codes with a sign": ({"operands": [replace(MATRIX, codes=MATRIX.codes.to(torch.int8))]}, "codes is torch.int8"),
    "codes of another width": ({"x": X[:, :64].contiguous()}, "x has 64 columns, a matrix has 128"),
    "too few scales": ({"operands": [replace(MATRIX, scales=MATRIX.scales[:1])]}, r"scales has shape \(1, 32\)"),
    "scales of floats": ({"operands": [replace(MATRIX, scales=MATRIX.scales.float())]}, "of 16 bits"),
    "scales of two types": (
        {"operands": [MATRIX, replace(MATRIX, scales=MATRIX.scales.bfloat16())]},
        "those of the first torch.float16",
    ),
    "half a tile": (
        {"operands": [Int4Operand(MATRIX.codes[:8], MATRIX.scales[:, :8], MATRIX.zeros[:, :4], None, 64)]},
        "must be whole tiles",
    ),
    "groups of 16": ({"operands": [make((32, 128), 16).matrix]}, "groups of 16 columns"),
    "a short order": (
        {"operands": [replace(MATRIX, order=torch.zeros(64, dtype=torch.int16))]},
        r"order has shape \(64,\)",
    ),
    "one of them elsewhere": ({"operands": [MATRIX, ELSEWHERE]}, "codes is on meta, must be on cpu"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}


test_it_refuses_by_name = refused_by_name(int4_gemv, {"x": X, "operands": [MATRIX]}, REFUSED)


def test_bytes():
    weights = 4096 * 14336 // 2 + 112 * 4096 * 2 + 112 * 4096 // 2
    assert int4_gemv_bytes(1, 4096, 14336, 128) == weights + 2 * (4096 + 14336)
    assert int4_dequantize_bytes(4096, 14336, 128, HALF) == weights + 2 * 4096 * 14336


@pytest.mark.parametrize(
    ("group", "columns", "scales", "expected"),
    [(128, 576, HALF, True), (576, 576, BF16, True), (16, 64, HALF, False), (64, 64, F32, False)],
)
def test_what_it_reads(group, columns, scales, expected):
    assert reads(make((16, columns), group, scales=scales).matrix) == expected


def test_it_gathers_what_fits_into_shared_memory_on_every_card():
    wider, order = make((16, WIDEST_ORDER + 128), 128).matrix, torch.zeros(WIDEST_ORDER + 128, dtype=torch.int16)
    assert reads(wider)
    assert not reads(replace(wider, order=order))


def multiply(operand: Int4Sample, x, **around):
    return int4_gemv(x, [operand.matrix], **around)


@pytest.mark.cuda
class TestOnTheDevice:
    @pytest.mark.parametrize("group", GROUPS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_it_is_as_good_as_a_16_bit_product(self, shape, dtype, group):
        operand = make(shape, group if shape[1] % group == 0 else 64, seed=shape[0], device="cuda")
        x = inputs(24, shape[1], dtype, "cuda")
        for rows in (1, 3, 8):
            results = [multiply(operand, part) for part in x.split(rows)]
            assert results[0].shape == (rows, shape[0])
            assert results[0].dtype == dtype
            assert_as_good_as_naive(torch.cat(results), x, operand.dense)

    @pytest.mark.parametrize(
        ("group", "kind"),
        [(576, {}), (128, {}), (64, {"scales": BF16}), (64, {"act_order": True}), (32, {"act_order": True}),
         (1024, {"act_order": True})],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_groups_types_of_scales_and_orders(self, group, kind, dtype):
        operand = make((320, 1216 if group == 1024 else 576), group, 3, "cuda", **kind)
        x = inputs(8, operand.matrix.in_features, dtype, "cuda")
        for rows in (1, 8):
            assert_as_good_as_naive(multiply(operand, x[:rows]), x[:rows], operand.dense)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rows", range(1, 9))
    def test_every_number_of_rows_with_bias(self, rows, dtype):
        operand = make((320, 1344), 64, rows, "cuda")
        bias = 5 * torch.randn(320, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)).to(dtype)
        x = inputs(rows, 1344, dtype, "cuda", seed=rows)
        assert_as_good_as_naive(int4_gemv(x, biased([operand.matrix], [bias])), x, operand.dense, bias)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("group", GROUPS)
    def test_single_columns_come_out_exactly(self, group, dtype):
        """x = one unit vector per row picks columns of W: a wrong nibble, lane or scale cannot hide in a sum."""
        operand = make((144, 640), group, 9, "cuda", act_order=group == 64)
        wide = replace(operand.packed, scales=operand.packed.scales.float())  # exact: 5 bits times 11
        weight = int4_codec.dequantize(wide, F32)
        for first in range(0, 640, 8):
            x = torch.eye(640, dtype=dtype, device="cuda")[first : first + 8]
            got = multiply(operand, x, out=torch.empty(8, 144, device="cuda"))
            assert torch.equal(got, weight[:, first : first + 8].T)

    def test_a_row_does_not_depend_on_the_others(self):
        operand = make((256, 1216), 64, device="cuda")
        x = inputs(8, 1216, BF16, "cuda")
        together = multiply(operand, x)
        for row in range(8):
            assert torch.equal(bits(multiply(operand, x[row : row + 1])), bits(together[row : row + 1]))

    @pytest.mark.parametrize("columns", [1088, 29568], ids=["staged", "read where it is"])
    def test_what_is_not_finite_stays_in_its_row(self, columns):
        operand = make((96, columns), 64, device="cuda")
        x = inputs(5, columns, HALF, "cuda")
        clean = multiply(operand, x)
        x[2, columns - 3], x[4, 70] = torch.inf, torch.nan
        got = multiply(operand, x)
        assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
        expected = torch.inf * operand.dense[:, columns - 3]  # inf * 0 is NaN
        assert torch.equal(got[2].isnan(), expected.isnan())
        assert torch.equal(got[2].float().nan_to_num(0.0), expected.half().float().nan_to_num(0.0))
        assert got[4].isnan().all()

    def test_out_is_filled_and_its_neighbours_stay(self):
        operand = make((208, 704), 64, device="cuda")
        buffer = torch.full((5, 208), torch.nan, dtype=BF16, device="cuda")
        out = buffer[1:4]
        assert multiply(operand, inputs(3, 704, BF16, "cuda"), out=out) is out
        assert torch.isfinite(out).all()
        assert buffer[[0, 4]].isnan().all()

    @pytest.mark.parametrize("rows", [1, 7])
    def test_20_runs_give_the_same_bits(self, rows):
        operand, x = make((9008, 1600), 64, device="cuda"), inputs(rows, 1600, HALF, "cuda")
        first = multiply(operand, x)
        for _ in range(20):
            assert torch.equal(bits(multiply(operand, x)), bits(first))

    def test_a_captured_graph_reads_what_is_there_at_replay(self):
        operand = make((320, 576), 64, device="cuda", act_order=True)
        x, later = (inputs(4, 576, HALF, "cuda", seed=seed) for seed in (1, 2))
        expected = multiply(operand, later)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = multiply(operand, x)
        x.copy_(later)
        for _ in range(3):
            got.fill_(torch.nan)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(got), bits(expected))

    def test_a_chain_of_launches_reads_what_the_one_before_wrote(self):
        """Each launch may begin while the one before still runs: the weights come early, x must not."""
        operand = make((1024, 1024), 128, 5, "cuda", act_order=True)
        x = inputs(1, 1024, HALF, "cuda")
        norm = gemv.Norm(torch.ones(1024, dtype=HALF, device="cuda"), 1e-5)  # keeps the chain finite
        chain, apart = x, x
        for _ in range(8):
            chain = multiply(operand, chain, norm=norm)
        for _ in range(8):
            apart = multiply(operand, apart, norm=norm)
            torch.cuda.synchronize()
        assert torch.isfinite(chain).all()
        assert torch.equal(bits(chain), bits(apart))

    @pytest.mark.parametrize("kind", ["plain", "offset"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("columns", "act_order"), [(576, False), (4096, False), (4096, True)])
    def test_norm_three_matrices_biases_and_residual_in_one_launch(self, columns, act_order, dtype, kind):
        outs = (576, 96, 32)
        operands = [make((out, columns), 64, out, "cuda", act_order=act_order) for out in outs]
        if act_order:  # as checkpoints have them: what reads one x has one order
            order = operands[0].packed.order
            operands = [Int4Sample(replace(each.packed, order=order), replace(each.matrix, order=order))
                        for each in operands]  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(3)
        x = inputs(1, columns, dtype, "cuda", seed=columns)
        weight = torch.rand(columns, device="cuda", generator=generator) + 0.5
        norm = gemv.Norm(weight if kind == "offset" else weight.to(dtype), 1e-5)
        bias = torch.randn(704, device="cuda", generator=generator).to(dtype)
        residual = torch.randn(1, 704, device="cuda", generator=generator).to(dtype)
        matrices = [operand.matrix for operand in operands]
        got = int4_gemv(x, biased(matrices, bias.split(outs)), norm=norm, residual=residual)
        dense = torch.cat([operand.dense for operand in operands])
        # The residual enters before the one rounding, so the sum as a whole is what a naive product with a bias gives.
        assert_as_good_as_naive(got, normed(x, norm), dense, bias=bias.float() + residual[0].float())

    @pytest.mark.parametrize("activation", list(ACTIVATIONS))
    @pytest.mark.parametrize("rows", [1, 5])
    def test_gate_and_up_in_one_launch(self, rows, activation):
        operands = [make((1056, 1088), 64, seed, "cuda") for seed in (1, 2)]
        x = inputs(rows, 1088, HALF, "cuda") / 8
        out = torch.full((rows, 1056), torch.nan, device="cuda")
        got = int4_gemv(x, [operand.matrix for operand in operands], activation=activation, out=out)
        gate, up = (x.double() @ each.dense.double().T for each in operands)
        exact = ACTIVATIONS[activation](gate) * up
        halves = [torch.nn.functional.linear(x, each.dense.half()) for each in operands]
        naive = ((ACTIVATIONS[activation](halves[0]) * halves[1]).double() - exact).abs().max()
        assert (got.double() - exact).abs().max() <= 2 * naive

    def test_out_may_be_the_residual(self):
        operand = make((320, 640), 128, device="cuda")
        x, stream = inputs(1, 640, BF16, "cuda"), torch.randn(1, 320, device="cuda").bfloat16()
        expected = multiply(operand, x, residual=stream)
        assert torch.equal(bits(multiply(operand, x, residual=stream, out=stream)), bits(expected))

    @pytest.mark.parametrize("scales", [HALF, BF16, F32], ids=str)
    @pytest.mark.parametrize(("shape", "group"), [((48, 320), 16), ((576, 576), 128), ((1008, 2112), 32),
                                                  ((320, 576), 576), ((4096, 4096), 128)])  # fmt: skip
    def test_dequantize_is_the_definition_bit_for_bit(self, shape, group, scales):
        operand = make(shape, group, 7, "cuda", scales=scales)
        for dtype in (HALF, BF16, F32):
            expected = int4_codec.dequantize(operand.packed, dtype)
            got = int4_dequantize(operand.matrix, 0, torch.empty(shape, dtype=dtype, device="cuda"))
            assert torch.equal(bits(got), bits(expected))
            rows = torch.empty(shape[0] - 32, shape[1], dtype=dtype, device="cuda")
            assert torch.equal(bits(int4_dequantize(operand.matrix, 32, rows)), bits(expected[32:]))

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", [(28672, 8192), (8192, 28672)], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_large_matrices(self, shape, dtype):
        operand = make(shape, 128, device="cuda")
        dense = operand.dense
        for rows in (1, 8):
            x = inputs(rows, shape[1], dtype, "cuda", seed=rows)
            got = multiply(operand, x)
            for first in range(0, shape[0], 4096):  # the fp64 copy of a part of W at a time
                part = slice(first, first + 4096)
                assert_as_good_as_naive(got[:, part], x, dense[part])
