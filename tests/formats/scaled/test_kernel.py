"""scaled_gemv and scaled_dequantize: what they refuse; on a GPU, as close to fp64 as a 16-bit product, bit for bit, and
the same bits every time. What they do without a GPU: test_kernel_emulated.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.formats.cases import BY_OP
from localq.formats.scaled.kernel import (
    KINDS,
    WIDEST,
    ScaledOperand,
    reads,
    scaled_dequantize,
    scaled_dequantize_bytes,
    scaled_gemv,
    scaled_gemv_bytes,
)
from localq.kernels import gemv
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_operands import biased, normed
from tests.support.kernels.scaled_operands import VARIANTS, make

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = tuple(shape for shape in BY_OP["scaled_gemv"].shapes)
X, MATRIX = inputs(3, 512, BF16), make((32, 512), "nvfp4").matrix
ROWS, GROUPS = make((32, 512), "fp8 rows").matrix, make((32, 512), "int8 g64").matrix
REFUSED = {
    "nine rows": ({"x": inputs(9, 512, HALF)}, r"x has shape \(9, 512\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "an unknown kind": ({"operands": [replace(MATRIX, kind="fp6")]}, "the matrix is 'fp6', must be of nvfp4, fp8"),
    "codes of signed bytes": ({"operands": [replace(MATRIX, codes=MATRIX.codes.view(torch.int8))]}, "codes is"),
    "half a tile": ({"operands": [replace(MATRIX, codes=MATRIX.codes[:8])]}, "must be whole tiles of 16 rows, 64"),
    "half a block": (
        {"operands": [replace(MATRIX, codes=MATRIX.codes[:, :16].contiguous())]}, "must be whole tiles of 16 rows, 64"
    ),
    "another width": ({"x": X[:, :256].contiguous()}, "x has 256 columns, a matrix has 512"),
    "no scales": ({"operands": [replace(MATRIX, scales=None)]}, "scales is None, nvfp4 has scales"),
    "scales of floats": ({"operands": [replace(MATRIX, scales=MATRIX.scales.float())]}, "scales is torch.float32"),
    "a factor of a row": ({"operands": [replace(MATRIX, factors=torch.ones(32))]}, r"factors has shape \(32,\)"),
    "one factor": ({"operands": [replace(ROWS, factors=torch.ones(1))]}, r"factors has shape \(1,\), must have 32"),
    "no zero points": ({"operands": [replace(GROUPS, zeros=None)]}, "zeros is None, int8 g64 has zero points"),
    "one of them elsewhere": (
        {"operands": [MATRIX, replace(MATRIX, codes=MATRIX.codes.to("meta"))]}, "scales is on cpu, must be on meta"
    ),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}  # fmt: skip


test_it_refuses_by_name = refused_by_name(scaled_gemv, {"x": X, "operands": [MATRIX]}, REFUSED)


def test_bytes():
    weights = 4096 * 14336 // 2 + 4096 * 14336 // 16 + 4
    assert scaled_gemv_bytes("nvfp4", 1, 4096, 14336) == weights + 2 * (4096 + 14336)
    assert scaled_dequantize_bytes("nvfp4", 4096, 14336, HALF) == weights + 2 * 4096 * 14336
    for kind in KINDS:
        assert scaled_gemv_bytes(kind, 1, 32, 512) - 2 * 544 == make((32, 512), kind).matrix.nbytes


def test_what_it_reads():
    assert reads(MATRIX)
    assert reads(make((16, WIDEST), "fp8 rows").matrix)
    assert not reads(make((16, WIDEST + 64), "fp8 rows").matrix)
    assert not reads(replace(MATRIX, codes=MATRIX.codes[:8]))


def on_device(sample):
    matrix = sample.matrix
    moved = {name: None if (each := getattr(matrix, name)) is None else each.cuda()
             for name in ("codes", "scales", "zeros", "factors")}  # fmt: skip
    return ScaledOperand(matrix.kind, **moved, divides=matrix.divides, through=matrix.through)


@pytest.mark.cuda
class TestOnTheDevice:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_it_is_as_good_as_a_16_bit_product(self, shape, dtype, variant):
        if shape[1] % KINDS[variant.partition(",")[0]].columns:
            pytest.skip("not of whole blocks")
        sample = make(shape, variant, seed=shape[0])
        matrix, dense = on_device(sample), sample.weight.cuda()
        x = inputs(24, shape[1], dtype, "cuda") / float(sample.weight.abs().max())
        for rows in (1, 3, 8):
            results = [scaled_gemv(part, [matrix]) for part in x.split(rows)]
            assert_as_good_as_naive(torch.cat(results), x, dense)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_gate_and_up_with_norm_and_bias(self, variant):
        samples = [make((320, 1536), variant, seed) for seed in (1, 2)]
        size = max(float(each.weight.abs().max()) for each in samples)
        x = inputs(1, 1536, HALF, "cuda")
        norm = gemv.Norm(torch.full((1536,), 1 / (16 * size), dtype=HALF, device="cuda"), 1e-5)
        bias = torch.randn(640, device="cuda").half()
        pair = biased([on_device(each) for each in samples], bias.split(320))
        got = scaled_gemv(x, pair, norm=norm, activation="silu", out=torch.empty(1, 320, device="cuda"))
        wide = normed(x, norm).double()
        gate, up = (wide @ each.dense.cuda().T + part.double()
                    for each, part in zip(samples, bias.split(320), strict=True))  # fmt: skip
        torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_three_matrices_with_a_residual_and_factors_of_their_own(self, rows):
        outs, columns = (320, 64, 64), 1536
        samples = [make((out, columns), variant, out)
                   for out, variant in zip(outs, ("nvfp4", "nvfp4, divided", "nvfp4"), strict=True)]  # fmt: skip
        x = inputs(rows, columns, BF16, "cuda") / 64
        residual = torch.randn(rows, sum(outs), device="cuda").bfloat16()
        got = scaled_gemv(x, [on_device(each) for each in samples], residual=residual,
                          out=torch.empty(rows, sum(outs), device="cuda"))  # fmt: skip
        dense = torch.cat([each.dense for each in samples]).cuda()
        exact = x.double() @ dense.T + residual.double()
        size = x.double().abs() @ dense.abs().T + residual.double().abs()
        assert ((got.double() - exact).abs() <= 1e-5 * size).all()

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_same_bits_every_time_in_a_graph_too(self, variant):
        sample = make((1008, 2304), variant, 3)
        matrix, x = on_device(sample), inputs(1, 2304, HALF, "cuda")
        out = torch.empty(1, 1008, device="cuda")
        first = scaled_gemv(x, [matrix], out=torch.empty_like(out))
        graph = torch.cuda.CUDAGraph()
        scaled_gemv(x, [matrix], out=out)
        with torch.cuda.graph(graph):
            scaled_gemv(x, [matrix], out=out)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(bits(out), bits(first))

    @pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_dequantize_is_the_definition_bit_for_bit(self, variant, dtype):
        for shape in BY_OP["scaled_dequantize"].shapes:
            if shape[1] % KINDS[variant.partition(",")[0]].columns:
                continue
            sample = make(shape, variant, 7)
            got = scaled_dequantize(on_device(sample), 0, torch.empty(shape, dtype=dtype, device="cuda"))
            assert torch.equal(bits(got.cpu()), bits(sample.weight.to(dtype)))
