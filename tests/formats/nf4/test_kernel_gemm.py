"""nf4_gemm on a GPU: as close to fp64 as a 16-bit product is, the same bits every time, rows that stay apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.formats import nf4
from localq.formats.cases import BY_OP
from localq.formats.nf4.kernel import nf4_gemm
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, in_order, inputs, operands, operands_of

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16]
ORDERS = pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "row-wise"])
# Column blocks 1, 5, 9, 17, 33, 64, 65: fewer than the warps that share a tile, chunks of eight that are full, partly
# full and missing. Outputs: one, less than a tile, tiles that are not full, an odd number of them, more than a GPU
# holds at a time.
SHAPES = BY_OP["nf4_gemm"].shapes
# Tiles of 8 rows of x that are full and not, every size of the kernel, and 64 rows at once exceeded by one and by many.
ROWS = (1, 9, 16, 17, 31, 32, 33, 64, 65, 129)
TABLE_SCALE = 1.6384992599487305  # of the float16 table, csrc/nf4/mma.cuh


@ORDERS
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_good_as_a_16_bit_product(shape, dtype, nested, tiled):
    weight = operands(shape, nested, seed=shape[0], device="cuda")
    matrix, x = in_order(weight.matrix, tiled), inputs(129, shape[1], dtype, "cuda")
    for rows in (9, 31, 64, 129):
        parts = x[: 129 // rows * rows].split(rows)  # many rows in all: then one output gives a largest error as well
        results = [nf4_gemm(part, matrix) for part in parts]
        assert results[0].shape == (rows, shape[0])
        assert results[0].dtype == dtype
        assert_as_good_as_naive(torch.cat(results), torch.cat(parts), weight.dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows_with_bias(rows, dtype):
    weight = operands((321, 1344), seed=rows, device="cuda")
    bias = 5 * torch.randn(321, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)).to(dtype)
    x = inputs(rows, 1344, dtype, "cuda", seed=rows)
    got = nf4_gemm(x, replace(in_order(weight.matrix, True), bias=bias))
    assert_as_good_as_naive(got, x, weight.dense, bias)


@ORDERS
@pytest.mark.parametrize("shape", [(37, 640), (130, 2112)], ids=str)
def test_single_columns_come_out_exactly(shape, tiled):
    """x = one unit vector per row picks columns of W: a wrong nibble, lane or scale cannot hide in a sum."""
    weight = operands(shape, seed=9, device="cuda")
    packed = weight.packed
    table = (nf4.CODE_MAP.cuda() * TABLE_SCALE).half().float()
    pairs = torch.stack((packed.codes >> 4, packed.codes & 15), dim=-1).flatten(-2).int()
    scaled = table[pairs].view(shape[0], -1, 64) * nf4.absmax_f32(packed).unsqueeze(-1)
    expected = (scaled * torch.tensor(1 / TABLE_SCALE).float().cuda()).half().view(shape)
    units = torch.eye(shape[1], dtype=torch.float16, device="cuda")
    assert torch.equal(nf4_gemm(units, in_order(weight.matrix, tiled)), expected.T)


def test_both_orders_give_the_same_bits():
    weight = operands((333, 1216), device="cuda")
    x = inputs(40, 1216, torch.float16, "cuda")
    assert torch.equal(*(bits(nf4_gemm(x, in_order(weight.matrix, tiled))) for tiled in (False, True)))


@pytest.mark.parametrize("rows", [12, 30, 64], ids=str)
def test_a_row_does_not_depend_on_the_others(rows):
    matrix = in_order(operands((257, 1216), device="cuda").matrix, True)
    x = inputs(rows, 1216, torch.bfloat16, "cuda")
    together = nf4_gemm(x, matrix)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).cuda()
    assert torch.equal(bits(nf4_gemm(x[order], matrix)), bits(together[order]))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_stay_in_their_row(value):
    matrix = in_order(operands((99, 1088), nested=False, device="cuda").matrix, True)
    x = inputs(21, 1088, torch.float16, "cuda")
    clean = nf4_gemm(x, matrix)
    x[2, 1085], x[20, 70] = value, value
    got = nf4_gemm(x, matrix)
    others = [row for row in range(21) if row not in (2, 20)]
    assert torch.equal(bits(got[others]), bits(clean[others]))
    assert not torch.isfinite(got[[2, 20]]).any()


@pytest.mark.parametrize("rows", [11, 70], ids=str)
def test_out_is_filled_and_its_neighbours_stay(rows):
    matrix = in_order(operands((203, 704), device="cuda").matrix, True)
    buffer = torch.full((rows + 2, 203), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = buffer[1:-1]
    assert nf4_gemm(inputs(rows, 704, torch.bfloat16, "cuda"), matrix, out=out) is out
    assert torch.isfinite(out).all()
    assert buffer[[0, -1]].isnan().all()


@pytest.mark.parametrize(("shape", "rows"), [((5003, 4160), 64), ((40009, 192), 16), ((272, 4096), 129)], ids=str)
def test_20_runs_give_the_same_bits(shape, rows):
    matrix = in_order(operands(shape, device="cuda").matrix, True)
    x = inputs(rows, shape[1], torch.float16, "cuda")
    first = nf4_gemm(x, matrix)
    for _ in range(20):
        assert torch.equal(bits(nf4_gemm(x, matrix)), bits(first))


def test_it_runs_on_the_current_stream():
    matrix = in_order(operands((513, 2112), device="cuda").matrix, True)
    x, later = (inputs(20, 2112, torch.float16, "cuda", seed=seed) for seed in (1, 2))
    expected = nf4_gemm(later, matrix)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms: another stream would read the old x
        x.copy_(later)
        got = nf4_gemm(x, matrix)
    stream.synchronize()
    assert torch.equal(bits(got), bits(expected))


def test_a_captured_graph_reads_what_is_there_at_replay():
    matrix = in_order(operands((321, 576), device="cuda").matrix, True)
    bias = torch.ones(321, device="cuda").half()
    x, later = (inputs(24, 576, torch.float16, "cuda", seed=seed) for seed in (1, 2))
    expected = nf4_gemm(later, replace(matrix, bias=bias))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = nf4_gemm(x, replace(matrix, bias=bias))
    x.copy_(later)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(got), bits(expected))


def test_products_behind_each_other_do_not_overtake():
    """Each reads what the one before has just written: a launch that begins early must wait for its x."""
    down, up = (
        in_order(operands(shape, nested=False, device="cuda").matrix, True) for shape in ((192, 4160), (4160, 192))
    )
    x = torch.randn(33, 192, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16() / 64
    expected = x
    for matrix in (up, down) * 2:
        expected = nf4_gemm(expected, matrix)
        torch.cuda.synchronize()
    for _ in range(20):
        got = x
        for matrix in (up, down) * 2:
            got = nf4_gemm(got, matrix)
        assert torch.equal(bits(got), bits(expected))
    assert torch.isfinite(expected).all()


def test_it_runs_where_the_tensors_are():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weight, x = operands((65, 576), device="cuda:1"), inputs(19, 576, torch.float16, "cuda:0")
    expected = nf4_gemm(x, operands_of(weight.packed.to("cuda:0")).matrix)
    with torch.cuda.device(0):
        assert torch.equal(bits(nf4_gemm(x.to("cuda:1"), weight.matrix).to("cuda:0")), bits(expected))
        assert torch.cuda.current_device() == 0


def test_unaligned_tensors_are_named():
    matrix = operands((3, 64), device="cuda").matrix
    x = torch.zeros(9 * 64 + 1, dtype=torch.float16, device="cuda")[1:].view(9, 64)
    with pytest.raises(ValueError, match="nf4_gemm: x = 2, bytes past"):
        nf4_gemm(x, matrix)
    shifted = replace(matrix, codes=torch.zeros(97, dtype=torch.uint8, device="cuda")[1:])
    with pytest.raises(ValueError, match="nf4_gemm: codes = 1, bytes past"):
        nf4_gemm(torch.zeros(9, 64, dtype=torch.float16, device="cuda"), shifted)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(28672, 8192), (8192, 28672)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_matrices(shape, dtype):
    weight = operands(shape, device="cuda")
    matrix, dense = in_order(weight.matrix, True), weight.dense
    for rows in (16, 64):
        x = inputs(rows, shape[1], dtype, "cuda", seed=rows)
        got = nf4_gemm(x, matrix)
        for first in range(0, shape[0], 4096):  # the fp64 copy of a part of W at a time
            part = slice(first, first + 4096)
            assert_as_good_as_naive(got[:, part], x, dense[part])
