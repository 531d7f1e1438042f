"""The Linear of GGUF blocks: tiles, slabs, columns in another order, types without kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from localq.files.gguf.block_types import KERNEL_TYPES
from localq.formats import gguf
from localq.formats.gguf import kernel as gguf_kernel
from localq.formats.gguf import tiles
from localq.formats.gguf.codec import Packed
from tests.support.kernels import reference_kernels

COLUMNS = 512


def packed_of(type: str, *, ordered: bool = True, rows: int = 96) -> Packed:
    if type in KERNEL_TYPES:
        packed = gguf.sample((rows, COLUMNS), 3, scheme=type)
    else:
        blocks = torch.randint(0, 60, (rows, 4 * 18), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        packed = Packed(blocks, type)
    places = torch.randperm(COLUMNS // 8, generator=torch.Generator().manual_seed(2)).to(torch.int16)
    return packed if ordered else replace(packed, places=places)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of sums in another order."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * float(expected.norm()))


def test_the_types_with_kernels_are_those_with_tiles():
    assert set(tiles.TILED_TYPES) == KERNEL_TYPES
    assert set(gguf.VARIANTS) == KERNEL_TYPES


@pytest.mark.parametrize("type", gguf.VARIANTS)
def test_what_is_stored_has_the_described_layout(type):
    stored = gguf.stored(gguf.sample((32, COLUMNS), 1, scheme=type))
    assert {suffix: (each.dtype, tuple(each.shape)) for suffix, each in stored.items()} == gguf.layout(
        32, COLUMNS, type
    )


@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "Q8_0", "IQ3_S", "NVFP4", "TQ1_0", "Q1_0"])
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "another order"])
def test_slabs_of_any_size_give_the_product(type, ordered):
    packed = packed_of(type, ordered=ordered)
    weight, bias, x = gguf.dequantize(packed, torch.float32), torch.randn(96), torch.randn(11, COLUMNS)
    expected = F.linear(x, weight, bias)
    linear = gguf.Linear(packed, bias)
    for _ in ("as in the file", "in tiles, where the type has them"):
        assert torch.equal(linear(x), expected)
        for rows in (16, 48, 96):
            linear.scratch = torch.zeros(4 * COLUMNS * rows, dtype=torch.uint8)
            assert_near(linear._by_slabs(x), expected)
            part = linear.product_of_rows(x, 32, 48, None)
            assert_near(part, F.linear(x, weight[32:80]))
        linear.tile_()
    assert linear.tiled == (type in KERNEL_TYPES)
    assert torch.equal(linear.packed.blocks, packed_of(type).blocks)


def test_unpacking_is_done_by_the_kernel(monkeypatch):
    reference_kernels.install(monkeypatch)
    packed = packed_of("Q5_K", ordered=False)
    linear = gguf.Linear(packed).tile_()
    got = linear.unpack(32, torch.empty(32, COLUMNS))
    assert torch.equal(got, gguf.dequantize(packed_of("Q5_K"), torch.float32)[32:64])
    with pytest.raises(ValueError, match="is not in tiles"):
        gguf.Linear(packed_of("Q5_K")).unpack(0, torch.empty(96, COLUMNS))


def test_rows_that_fill_no_tile_have_no_operand():
    linear = gguf.Linear(packed_of("Q4_K", rows=40)).tile_()
    assert not linear.tiled
    assert linear.operand() is None
    assert linear.format == "GGUF Q4_K"
    assert gguf_kernel.reads(gguf.Linear(packed_of("Q4_K")).tile_().operand())
