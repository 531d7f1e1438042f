"""nf4_dequantize on a GPU: every bit as `formats.nf4.dequantize` and bitsandbytes give it, and nothing else written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.formats import nf4
from localq.formats.cases import BY_OP
from localq.formats.nf4.kernel import nf4_dequantize
from tests.support.kernels.nf4_operands import bits, in_order, operands, operands_of

pytestmark = pytest.mark.cuda

# One block; a block of threads that is not full; tiles and chunks of eight blocks that are full, short and missing;
# nested blocks that are not full; many thread blocks.
SHAPES = BY_OP["nf4_dequantize"].shapes
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ORDERS = pytest.mark.parametrize("tiled", [False, True], ids=["row-wise", "tiled"])


def expected(packed, dtype):
    """Bits of the reference, on the CPU."""
    return bits(nf4.dequantize(packed.to("cpu"), dtype))


@ORDERS
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit_is_the_references(shape, dtype, nested, tiled):
    weight = operands(shape, nested, device="cuda", seed=shape[0])
    got = nf4_dequantize(in_order(weight.matrix, tiled), dtype)
    assert got.shape == shape
    assert got.dtype == dtype
    assert torch.equal(bits(got.cpu()), expected(weight.packed, dtype))


# First rows and counts: one tile; from the middle to the end; nothing but the rows behind the last whole tile.
@ORDERS
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(0, 16), (16, 48), (32, 45), (64, 13), (0, 77)], ids=str)
def test_a_slab_is_these_rows_of_the_whole_and_no_more(rows, dtype, nested, tiled):
    first, count = rows
    weight = operands((77, 704), nested, device="cuda", seed=count)
    buffer = torch.full((count + 2, 704), torch.nan, device="cuda", dtype=dtype)
    out = buffer[1:-1]
    assert nf4_dequantize(in_order(weight.matrix, tiled), dtype, out, rows) is out
    assert torch.equal(bits(out.cpu()), expected(weight.packed, dtype)[first : first + count])
    assert buffer[[0, -1]].isnan().all()


@pytest.mark.parametrize("rows", [(3, 5), (0, 1), (76, 1), (17, 60)], ids=str)
def test_row_wise_slabs_begin_and_end_anywhere(rows):
    weight = operands((77, 192), device="cuda")
    got = nf4_dequantize(weight.matrix, torch.bfloat16, rows=rows)
    whole = expected(weight.packed, torch.bfloat16)
    assert torch.equal(bits(got.cpu()), whole[rows[0] : rows[0] + rows[1]])


@pytest.mark.parametrize("rows", [(8, 69), (0, 24), (72, 5)], ids=str)
def test_tiled_slabs_do_not_cut_tiles(rows):
    matrix = in_order(operands((77, 192), device="cuda").matrix, True)
    with pytest.raises(ValueError, match=f"nf4_dequantize: row_begin = {rows[0]}, cuts a tile of 16 rows"):
        nf4_dequantize(matrix, torch.float16, rows=rows)


@ORDERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_weights_come_back_as_bitsandbytes_has_them(dtype, tiled):
    bnb = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(577, 1088, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(1))
    packed = nf4.quantize(weight)
    got = nf4_dequantize(in_order(operands_of(packed).matrix, tiled), dtype)
    codes, state = bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    state.absmax, state.offset, state.state2.absmax = packed.absmax, packed.offset, packed.nested_absmax
    theirs = bnb.dequantize_4bit(packed.codes.view_as(codes), state)
    assert torch.equal(bits(got), bits(theirs))


@ORDERS
def test_values_beyond_float16_become_infinite(tiled):
    weight = operands((21, 192), nested=False, device="cuda")
    weight.packed.absmax[:] = 1e5
    got = nf4_dequantize(in_order(weight.matrix, tiled), torch.float16)
    assert got.isinf().any()
    assert torch.equal(bits(got.cpu()), expected(weight.packed, torch.float16))


@ORDERS
def test_20_runs_give_the_same_bits(tiled):
    matrix = in_order(operands((1001, 576), device="cuda").matrix, tiled)
    first = nf4_dequantize(matrix, torch.bfloat16)
    for _ in range(20):
        assert torch.equal(bits(nf4_dequantize(matrix, torch.bfloat16)), bits(first))


@ORDERS
def test_it_runs_on_the_current_stream(tiled):
    weight, other = (in_order(operands((129, 1536), seed=seed, device="cuda").matrix, tiled) for seed in (1, 2))
    wanted = nf4_dequantize(replace(weight, codes=other.codes), torch.float16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms: another stream would read the old codes
        weight.codes.copy_(other.codes)
        got = nf4_dequantize(weight, torch.float16)
    stream.synchronize()
    assert torch.equal(bits(got), bits(wanted))


@ORDERS
def test_a_captured_graph_reads_what_is_there_at_replay(tiled):
    weight, other = (in_order(operands((65, 704), seed=seed, device="cuda").matrix, tiled) for seed in (3, 4))
    wanted = nf4_dequantize(replace(weight, codes=other.codes), torch.float16)
    out = torch.empty(65, 704, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nf4_dequantize(weight, torch.float16, out)
    weight.codes.copy_(other.codes)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(out), bits(wanted))


def test_unaligned_tensors_are_named():
    matrix = operands((3, 64), device="cuda").matrix
    shifted = replace(matrix, codes=torch.zeros(97, dtype=torch.uint8, device="cuda")[1:])
    with pytest.raises(ValueError, match="nf4_dequantize: codes = 1, bytes past"):
        nf4_dequantize(shifted, torch.float16)
    out = torch.empty(3 * 64 + 1, dtype=torch.float16, device="cuda")[1:]
    with pytest.raises(ValueError, match="nf4_dequantize: out = 2, bytes past"):
        nf4_dequantize(matrix, torch.float16, out)


@pytest.mark.slow
@ORDERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_matrix(dtype, tiled):
    weight = operands((28672, 8192), device="cuda")
    got = nf4_dequantize(in_order(weight.matrix, tiled), dtype)
    assert torch.equal(bits(got), bits(nf4.dequantize(weight.packed, dtype)))


@pytest.mark.slow
@ORDERS
def test_more_weights_than_32_bits_count(tiled):
    """2^31 + 2^19 weights, 1 GiB of codes and 4 GiB of results: the last rows are where an offset would wrap."""
    shape, tail = (65552, 32768), 19
    weight = operands(shape, device="cuda")
    packed, got = weight.packed, nf4_dequantize(in_order(weight.matrix, tiled), torch.float16)
    last = replace(
        packed,
        codes=packed.codes[-tail:],
        absmax=nf4.absmax_f32(packed)[-tail:].reshape(-1),
        nested_absmax=None,
        nested_map=None,
        offset=None,
        shape=(tail, shape[1]),
    )
    assert torch.equal(bits(got[-tail:]), bits(nf4.dequantize(last, torch.float16)))
