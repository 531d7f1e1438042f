"""gguf_gemv and gguf_dequantize: what they refuse; on a GPU, as close to fp64 as a 16-bit product, bit for bit, and the
same bits every time. What they do without a GPU: test_kernel_emulated.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.files.gguf.block_types import by_name
from localq.formats.cases import BY_OP
from localq.formats.gguf import codec, tiles
from localq.formats.gguf.kernel import (
    WIDEST,
    GgufOperand,
    gguf_dequantize,
    gguf_dequantize_bytes,
    gguf_gemv,
    gguf_gemv_bytes,
    reads,
)
from localq.kernels import gemv
from tests.support.kernels.gguf_operands import make
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs
from tests.support.kernels.refusals import refused_by_name
from tests.support.kernels.row_operands import biased, normed

HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHAPES = BY_OP["gguf_gemv"].shapes
UNEVEN = ((80, 864), (48, 896), (80, 29_568))  # rows that end within an item, of types of 32 columns
TYPES = tiles.TILED_TYPES
TYPES_32 = tuple(type for type in TYPES if by_name(type).values == 32)
X, MATRIX = inputs(3, 512, BF16), make((32, 512), "Q4_K").matrix
REFUSED = {
    "nine rows": ({"x": inputs(9, 512, HALF)}, r"x has shape \(9, 512\)"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "no matrix": ({"operands": []}, "0 matrices"),
    "blocks of another type": ({"operands": [replace(MATRIX, type="Q1_0")]}, "blocks are Q1_0, must be of Q4_0"),
    "blocks of signed bytes": (
        {"operands": [replace(MATRIX, blocks=MATRIX.blocks.view(torch.int8))]}, "blocks is torch.int8"
    ),
    "half a tile": ({"operands": [replace(MATRIX, blocks=MATRIX.blocks[:8])]}, "must be whole blocks in tiles"),
    "another width": ({"x": X[:, :256].contiguous()}, "x has 256 columns, a matrix has 512"),
    "short places": (
        {"operands": [replace(MATRIX, places=torch.zeros(8, dtype=torch.int16))]}, r"places has shape \(8,\)"
    ),
    "one of them elsewhere": (
        {"operands": [MATRIX, GgufOperand(MATRIX.blocks.to("meta"), "Q4_K")]}, "blocks is on meta, must be on cpu"
    ),
    "all on the CPU": ({}, "blocks are on cpu, must be on a CUDA device"),
}  # fmt: skip


test_it_refuses_by_name = refused_by_name(gguf_gemv, {"x": X, "operands": [MATRIX]}, REFUSED)


def test_bytes():
    weights = 4096 * 14336 // 256 * 144
    assert gguf_gemv_bytes(1, 4096, 14336, "Q4_K") == weights + 2 * (4096 + 14336)
    assert gguf_dequantize_bytes(4096, 14336, "Q4_K", HALF) == weights + 2 * 4096 * 14336


def test_what_it_reads():
    assert reads(MATRIX)
    assert reads(make((16, WIDEST), "Q8_0").matrix)
    assert not reads(make((16, WIDEST + 256), "Q8_0").matrix)
    assert not reads(replace(MATRIX, blocks=MATRIX.blocks[:8]))
    assert not reads(GgufOperand(torch.zeros(16, 36, dtype=torch.uint8), "Q1_0"))


def test_halves_are_cut_between_tiles():
    bias = torch.arange(32.0)
    first, second = replace(MATRIX, bias=bias).halves()
    assert torch.equal(torch.cat((first.blocks, second.blocks)), MATRIX.blocks)
    assert torch.equal(second.bias, bias[16:])
    assert replace(MATRIX, blocks=MATRIX.blocks[:16]).halves() is None


def on_device(sample):
    return replace(sample.matrix, blocks=sample.matrix.blocks.cuda())


@pytest.mark.cuda
class TestOnTheDevice:
    @pytest.mark.parametrize("type", TYPES)
    @pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_it_is_as_good_as_a_16_bit_product(self, shape, dtype, type):
        self.as_good_as_naive(shape, dtype, type)

    @pytest.mark.parametrize("type", TYPES_32)
    @pytest.mark.parametrize("shape", UNEVEN, ids=str)
    def test_rows_that_end_within_an_item(self, shape, type):
        self.as_good_as_naive(shape, BF16, type)

    def as_good_as_naive(self, shape, dtype, type):
        sample = make(shape, type, seed=shape[0])
        matrix, dense = on_device(sample), sample.dense.float().cuda()
        x = inputs(24, shape[1], dtype, "cuda")
        for rows in (1, 3, 8):
            results = [gguf_gemv(part, [matrix]) for part in x.split(rows)]
            assert_as_good_as_naive(torch.cat(results), x, dense)

    @pytest.mark.parametrize("type", TYPES)
    def test_gate_and_up_with_norm_and_bias(self, type):
        samples = [make((320, 1536), type, seed) for seed in (1, 2)]
        x, norm = inputs(1, 1536, HALF, "cuda") / 8, gemv.Norm(torch.ones(1536, dtype=HALF, device="cuda"), 1e-5)
        bias = torch.randn(640, device="cuda").half()
        pair = biased([on_device(each) for each in samples], bias.split(320))
        got = gguf_gemv(x, pair, norm=norm, activation="silu", out=torch.empty(1, 320, device="cuda"))
        wide = normed(x, norm).double()
        gate, up = (wide @ each.dense.cuda().T + part.double()
                    for each, part in zip(samples, bias.split(320), strict=True))  # fmt: skip
        torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_three_matrices_with_a_residual_and_columns_in_another_order(self, rows):
        outs, columns = (320, 64, 64), 1536
        samples = [make((out, columns), "Q5_K", seed) for seed, out in enumerate(outs)]
        places = torch.randperm(columns // 8, generator=torch.Generator().manual_seed(1)).to(torch.int16)
        matrices = [replace(on_device(each), places=places.cuda()) for each in samples]
        matrices = [replace(each, places=matrices[0].places) for each in matrices]
        x, residual = inputs(rows, columns, BF16, "cuda"), torch.randn(rows, sum(outs), device="cuda").bfloat16()
        got = gguf_gemv(x, matrices, residual=residual, out=torch.empty(rows, sum(outs), device="cuda"))
        stored = torch.empty_like(x).view(rows, -1, 8)
        stored[:, places.long().cuda()] = x.view(rows, -1, 8)
        dense = torch.cat([each.dense for each in samples]).cuda()
        exact = stored.view(rows, -1).double() @ dense.T + residual.double()
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-3)

    @pytest.mark.parametrize("type", TYPES)
    def test_the_same_bits_every_time_in_a_graph_too(self, type):
        sample = make((1008, 2304), type, 3)
        matrix, x = on_device(sample), inputs(1, 2304, HALF, "cuda")
        first, out = gguf_gemv(x, [matrix]), torch.empty(1, 1008, dtype=HALF, device="cuda")
        graph = torch.cuda.CUDAGraph()
        gguf_gemv(x, [matrix], out=out)
        with torch.cuda.graph(graph):
            gguf_gemv(x, [matrix], out=out)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(bits(out), bits(first))

    @pytest.mark.parametrize("dtype", [HALF, BF16, F32], ids=str)
    @pytest.mark.parametrize("type", TYPES)
    def test_dequantize_is_the_definition_bit_for_bit(self, type, dtype):
        for shape in (*BY_OP["gguf_dequantize"].shapes, *(UNEVEN if type in TYPES_32 else ())):
            sample = make(shape, type, 7)
            got = gguf_dequantize(on_device(sample), 0, torch.empty(shape, dtype=dtype, device="cuda"))
            assert torch.equal(bits(got.cpu()), bits(codec.dequantize(sample.packed, dtype)))
