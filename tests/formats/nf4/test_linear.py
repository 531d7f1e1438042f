"""The Linear of NF4: its orders, its slabs and its choice of a way, with stand-ins where a GPU would be needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats import nf4
from localq.formats.nf4 import kernel as operations
from localq.formats.nf4 import linear as nf4_linear
from tests.support.kernels import reference_kernels

OUT, IN = 77, 704  # four whole tiles and 13 rows; a whole chunk of eight blocks and three


def linear(bias=True, out=OUT, nested=True):
    """A Linear, and its weights in float32."""
    generator = torch.Generator().manual_seed(out)
    packed = nf4.quantize(torch.randn(out, IN, generator=generator))
    if not nested:
        scales = nf4.absmax_f32(packed).flatten().contiguous()
        packed = nf4.Packed(packed.codes, scales, None, None, None, packed.shape, packed.dtype)
    added = torch.randn(out, generator=generator) if bias else None
    return nf4.Linear(packed, added), nf4.dequantize(packed, torch.float32)


def dequantize(matrix, dtype, out=None, rows=None):
    """As the kernel: a slab, into `out` where it is given."""
    first, count = rows if rows is not None else (0, matrix.out_features)
    weight = reference_kernels.nf4_weight(matrix, dtype)[first : first + count]
    return weight if out is None else out.copy_(weight)


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors claim to be on a GPU, and the kernels note who was called with how many rows."""
    calls = []

    def noted(name, operation):
        def call(x, *arguments, **around):
            calls.append((name, x.shape[0]))
            return operation(x, *arguments, **around)

        return call

    def gemm(x, matrix):
        return F.linear(x, reference_kernels.nf4_weight(matrix, x.dtype), matrix.bias)

    def gemv(x, operands):
        return gemm(x, operands[0])

    monkeypatch.setattr(operations, "nf4_dequantize", dequantize)
    monkeypatch.setattr(operations, "nf4_gemm", noted("gemm", gemm))
    monkeypatch.setattr(operations, "nf4_gemv", noted("gemv", gemv))
    monkeypatch.setattr(nf4_linear, "_rows_from", lambda device, weights: 33)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    return calls


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("out", [OUT, 16, 15])
def test_tiling_keeps_what_it_computes(out, nested):
    module, weight = linear(out=out, nested=nested)
    before, x = module.packed, torch.randn(3, IN)
    expected = module(x)
    addresses = module.codes.data_ptr(), module.absmax.data_ptr()
    codes = module.codes.clone()
    assert module.tile_() is module
    assert module.tiled
    assert module.operand().tiled
    assert addresses == (module.codes.data_ptr(), module.absmax.data_ptr())
    assert torch.equal(codes, module.codes) == (out < 16)
    assert torch.equal(module(x), expected)
    again = module.tile_().packed  # a second time changes nothing
    assert torch.equal(again.codes, before.codes if out < 16 else codes)
    assert torch.equal(nf4.dequantize(again, torch.float32), weight)


def test_the_matrix_is_made_of_the_buffers():
    module, _ = linear()
    matrix = module.operand()
    assert (matrix.codes.data_ptr(), matrix.absmax.data_ptr()) == (module.codes.data_ptr(), module.absmax.data_ptr())
    assert (matrix.out_features, matrix.in_features, matrix.tiled) == (OUT, IN, False)
    assert matrix.offset == float(module.offset)


def test_modules_of_one_device_share_equal_tables():
    first, second = linear()[0], linear(out=33)[0]
    assert first.code_map is second.code_map
    assert first.nested_map is second.nested_map


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("slab", [0, 16, 40, 64, OUT, 10 * OUT])
@pytest.mark.parametrize("tiled", [False, True], ids=["row-wise", "tiled"])
def test_slabs_give_the_whole_product(monkeypatch, slab, tiled, bias):
    """A scratch for so many rows; 0: not even for one tile, which then takes memory of its own."""
    monkeypatch.setattr(operations, "nf4_dequantize", dequantize)
    module, weight = linear(bias)
    if tiled:
        module.tile_()
    module.scratch = torch.full((max(slab * IN * 4, 1),), 255, dtype=torch.uint8)
    x = torch.randn(5, IN)
    assert module.slab_rows(torch.float32) == max(slab // 16 * 16, 16)
    torch.testing.assert_close(module._by_slabs(x), F.linear(x, weight, module.bias))


def test_a_slab_lies_in_the_scratch(monkeypatch):
    places = []

    def noted(matrix, dtype, out=None, rows=None):
        places.append((out.data_ptr(), tuple(out.shape), rows))
        return dequantize(matrix, dtype, out, rows)

    monkeypatch.setattr(operations, "nf4_dequantize", noted)
    module, _ = linear()
    module.scratch = torch.zeros(32 * IN * 2, dtype=torch.uint8)
    module.bias = None
    module._by_slabs(torch.randn(9, IN).bfloat16())
    start = module.scratch.data_ptr()
    assert places == [(start, (32, IN), (0, 32)), (start, (32, IN), (32, 32)), (start, (13, IN), (64, 13))]


def test_without_a_scratch_all_rows_are_dequantized_at_once(monkeypatch):
    monkeypatch.setattr(operations, "nf4_dequantize", dequantize)
    module, weight = linear()
    x = torch.randn(5, IN)
    assert module.slab_rows(torch.float32) == OUT
    assert torch.equal(module._by_slabs(x), F.linear(x, weight, module.bias))


@pytest.mark.parametrize(
    ("rows", "dtype", "way"),
    [
        (1, torch.float16, "gemv"),
        (8, torch.bfloat16, "gemv"),
        (9, torch.float16, "gemm"),
        (32, torch.bfloat16, "gemm"),
        (33, torch.float16, None),
        (1, torch.float32, None),
        (20, torch.float32, None),
    ],
)
def test_the_way_is_chosen_by_rows_and_type(on_gpu, rows, dtype, way):
    module, weight = linear()
    module.bias = module.bias.to(dtype)
    x = torch.randn(rows, IN).to(dtype)
    got = module(x)
    assert on_gpu == ([] if way is None else [(way, rows)])
    assert torch.equal(got, F.linear(x, weight.to(dtype), module.bias))
