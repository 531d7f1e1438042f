"""nf4_gemv on a GPU: as close to fp64 as a 16-bit product is, the same bits every time, rows that stay apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nf4_operands import assert_as_good_as_naive, bits, inputs, operands, operands_of

from localq.kernels import ops
from localq.quant import nf4

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16]
# Column blocks 1, 5, 9, 17, 33, 65: steps of four that are full, partly full and missing, and 1, 2, 4, 8, 8, 8 warps
# per tile. Outputs: one, tiles that are not full, more tiles than a GPU holds at a time.
SHAPES = [(1, 64), (15, 320), (577, 576), (33, 1088), (1001, 2112), (5003, 4160)]
TABLE_SCALE = 1.6384992599487305  # of the float16 table, csrc/nf4_gemv.cu
MANY_TILES = (40009, 192)  # one warp per tile because there are enough tiles


def multiply(weight, x, bias=None, out=None):
    return ops.nf4_gemv(x, **weight.arguments, out_features=weight.packed.shape[0], bias=bias, out=out)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, MANY_TILES], ids=str)
def test_it_is_as_good_as_a_16_bit_product(shape, dtype, nested):
    weight = operands(shape, nested, seed=shape[0], device="cuda")
    x = inputs(24, shape[1], dtype, "cuda")  # so many that even one output gives a largest error worth comparing
    for rows in (1, 3, 8):
        results = [multiply(weight, part) for part in x.split(rows)]
        assert results[0].shape == (rows, shape[0])
        assert results[0].dtype == dtype
        assert_as_good_as_naive(torch.cat(results), x, weight.dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows_with_bias(rows, dtype):
    weight = operands((321, 1344), seed=rows, device="cuda")
    bias = 5 * torch.randn(321, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)).to(dtype)
    x = inputs(rows, 1344, dtype, "cuda", seed=rows)
    assert_as_good_as_naive(multiply(weight, x, bias), x, weight.dense, bias)


@pytest.mark.parametrize("shape", [(37, 640), (130, 2112)], ids=str)
def test_single_columns_come_out_exactly(shape):
    """x = one unit vector per row picks columns of W: a wrong nibble, lane or scale cannot hide in a sum."""
    weight = operands(shape, seed=9, device="cuda")
    packed = weight.packed
    table = (nf4.CODE_MAP.cuda() * TABLE_SCALE).half().float()
    pairs = torch.stack((packed.codes >> 4, packed.codes & 15), dim=-1).flatten(-2).int()
    scaled = table[pairs].view(shape[0], -1, 64) * nf4.absmax_f32(packed).unsqueeze(-1)
    expected = (scaled * torch.tensor(1 / TABLE_SCALE).float().cuda()).half().view(shape)
    for first in range(0, shape[1], 8):
        x = torch.eye(shape[1], dtype=torch.float16, device="cuda")[first : first + 8]
        assert torch.equal(multiply(weight, x), expected[:, first : first + 8].T)


def test_a_row_does_not_depend_on_the_others():
    weight = operands((257, 1216), device="cuda")
    x = inputs(8, 1216, torch.bfloat16, "cuda")
    together = multiply(weight, x)
    for row in range(8):
        assert torch.equal(bits(multiply(weight, x[row : row + 1])), bits(together[row : row + 1]))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_stay_in_their_row_and_have_the_right_sign(value):
    weight = operands((99, 1088), nested=False, device="cuda")
    weight.packed.absmax[-3:] = 0.0
    x = inputs(5, 1088, torch.float16, "cuda")
    clean = multiply(weight, x)
    x[2, 1085], x[4, 70] = value, value
    got = multiply(weight, x)
    assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
    for row, column in ((2, 1085), (4, 70)):
        expected = value * weight.dense[:, column]  # inf * 0 is NaN, and so is a NaN of any sign
        assert torch.equal(got[row].isnan(), expected.isnan())
        assert torch.equal(got[row].float().nan_to_num(0.0), expected.nan_to_num(0.0))  # infinities become the largest


def test_out_is_filled_and_its_neighbours_stay():
    weight = operands((203, 704), device="cuda")
    buffer = torch.full((5, 203), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = buffer[1:4]
    assert multiply(weight, inputs(3, 704, torch.bfloat16, "cuda"), out=out) is out
    assert torch.isfinite(out).all()
    assert buffer[[0, 4]].isnan().all()


@pytest.mark.parametrize("shape", SHAPES[-2:], ids=str)
def test_20_runs_give_the_same_bits(shape):
    weight, x = operands(shape, device="cuda"), inputs(7, shape[1], torch.float16, "cuda")
    first = multiply(weight, x)
    for _ in range(20):
        assert torch.equal(bits(multiply(weight, x)), bits(first))


def test_it_runs_on_the_current_stream():
    weight = operands((513, 2112), device="cuda")
    x, later = (inputs(2, 2112, torch.float16, "cuda", seed=seed) for seed in (1, 2))
    expected = multiply(weight, later)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms: another stream would read the old x
        x.copy_(later)
        got = multiply(weight, x)
    stream.synchronize()
    assert torch.equal(bits(got), bits(expected))


def test_a_captured_graph_reads_what_is_there_at_replay():
    weight, bias = operands((321, 576), device="cuda"), torch.ones(321, device="cuda").half()
    x, later = (inputs(4, 576, torch.float16, "cuda", seed=seed) for seed in (1, 2))
    expected = multiply(weight, later, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = multiply(weight, x, bias)
    x.copy_(later)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(got), bits(expected))


def test_it_runs_where_the_tensors_are():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weight, x = operands((65, 576), device="cuda:1"), inputs(3, 576, torch.float16, "cuda:0")
    expected = multiply(operands_of(weight.packed.to("cuda:0")), x)
    with torch.cuda.device(0):
        assert torch.equal(bits(multiply(weight, x.to("cuda:1")).to("cuda:0")), bits(expected))
        assert torch.cuda.current_device() == 0


def test_unaligned_tensors_are_named():
    weight = operands((3, 64), device="cuda")
    x = torch.zeros(65, dtype=torch.float16, device="cuda")[1:].view(1, 64)
    with pytest.raises(ValueError, match="nf4_gemv: x = 2, bytes past"):
        multiply(weight, x)
    shifted = replace(weight.packed, codes=torch.zeros(97, dtype=torch.uint8, device="cuda")[1:].view(3, 32))
    with pytest.raises(ValueError, match="nf4_gemv: codes = 1, bytes past"):
        multiply(operands_of(shifted), torch.zeros(1, 64, dtype=torch.float16, device="cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(28672, 8192), (8192, 28672)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_matrices(shape, dtype):
    weight = operands(shape, device="cuda")
    dense = weight.dense
    for rows in (1, 8):
        x = inputs(rows, shape[1], dtype, "cuda", seed=rows)
        got = multiply(weight, x)
        for first in range(0, shape[0], 4096):  # the fp64 copy of a part of W at a time
            part = slice(first, first + 4096)
            assert_as_good_as_naive(got[:, part], x, dense[part])
