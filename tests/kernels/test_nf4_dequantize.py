"""nf4_dequantize on a GPU: every bit as `quant.nf4.dequantize` and bitsandbytes give it, and nothing else written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nf4_operands import bits, operands, operands_of

from localq.kernels import ops
from localq.quant import nf4

pytestmark = pytest.mark.cuda


def dequantize(weight, dtype, out=None):
    return ops.nf4_dequantize(**weight.arguments, shape=weight.packed.shape, dtype=dtype, out=out)


# One block; a block of threads that is not full; nested blocks that are not full; many thread blocks.
SHAPES = [(1, 64), (3, 320), (577, 576), (33, 1536), (1001, 2048)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit_is_the_references(shape, dtype, nested):
    packed = operands(shape, nested, seed=shape[0]).packed
    got = dequantize(operands_of(packed.to("cuda")), dtype)
    assert got.shape == shape
    assert got.dtype == dtype
    assert torch.equal(bits(got.cpu()), bits(nf4.dequantize(packed, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_weights_come_back_as_bitsandbytes_has_them(dtype):
    bnb = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(577, 1088, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(1))
    packed = nf4.quantize(weight)
    got = dequantize(operands_of(packed), dtype)
    codes, state = bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    state.absmax, state.offset, state.state2.absmax = packed.absmax, packed.offset, packed.nested_absmax
    theirs = bnb.dequantize_4bit(packed.codes.view_as(codes), state)
    assert torch.equal(bits(got), bits(theirs))


def test_values_beyond_float16_become_infinite():
    packed = operands((5, 192), nested=False).packed
    packed.absmax[:] = 1e5
    got = dequantize(operands_of(packed.to("cuda")), torch.float16)
    assert got.isinf().any()
    assert torch.equal(bits(got.cpu()), bits(nf4.dequantize(packed, torch.float16)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_is_filled_and_its_neighbours_stay(dtype):
    shape, margin = (37, 832), 64
    weight = operands(shape, device="cuda")
    buffer = torch.full((shape[0] * shape[1] + 2 * margin,), torch.nan, device="cuda", dtype=dtype)
    out = buffer[margin:-margin].view(shape)
    assert dequantize(weight, dtype, out) is out
    assert torch.isfinite(out).all()
    assert buffer[:margin].isnan().all()
    assert buffer[-margin:].isnan().all()


def test_20_runs_give_the_same_bits():
    weight = operands((1001, 576), device="cuda")
    first = dequantize(weight, torch.bfloat16)
    for _ in range(20):
        assert torch.equal(bits(dequantize(weight, torch.bfloat16)), bits(first))


def test_it_runs_on_the_current_stream():
    weight, other = (operands((129, 1536), seed=seed, device="cuda") for seed in (1, 2))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms: another stream would read the old codes
        weight.packed.codes.copy_(other.packed.codes)
        got = dequantize(weight, torch.float16)
    stream.synchronize()
    assert torch.equal(bits(got), bits(nf4.dequantize(weight.packed, torch.float16)))


def test_a_captured_graph_reads_what_is_there_at_replay():
    weight, other = (operands((65, 704), seed=seed, device="cuda") for seed in (3, 4))
    out = torch.empty(65, 704, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dequantize(weight, torch.float16, out)
    weight.packed.codes.copy_(other.packed.codes)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(out), bits(nf4.dequantize(weight.packed, torch.float16)))


def test_unaligned_tensors_are_named():
    weight = operands((3, 64), device="cuda")
    shifted = replace(weight.packed, codes=torch.empty(97, dtype=torch.uint8, device="cuda")[1:])
    with pytest.raises(ValueError, match="nf4_dequantize: codes = 1, bytes past"):
        dequantize(operands_of(shifted), torch.float16)
    out = torch.empty(3 * 64 + 1, dtype=torch.float16, device="cuda")[1:]
    with pytest.raises(ValueError, match="nf4_dequantize: out = 2, bytes past"):
        dequantize(weight, torch.float16, out)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_matrix(dtype):
    weight = operands((28672, 8192), device="cuda")
    assert torch.equal(bits(dequantize(weight, dtype)), bits(nf4.dequantize(weight.packed, dtype)))


@pytest.mark.slow
def test_more_weights_than_32_bits_count():
    """2^31 + 2^15 weights, 1 GiB of codes and 4 GiB of results: the last rows are where an offset would wrap."""
    shape = (65537, 32768)
    weight = operands(shape, device="cuda")
    packed, got = weight.packed, dequantize(weight, torch.float16)
    tail = replace(
        packed,
        codes=packed.codes[-3:],
        absmax=nf4.absmax_f32(packed)[-3:].reshape(-1),
        nested_absmax=None,
        nested_map=None,
        offset=None,
        shape=(3, 32768),
    )
    assert torch.equal(bits(got[-3:]), bits(nf4.dequantize(tail, torch.float16)))
