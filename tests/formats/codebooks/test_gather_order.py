"""Codewords by frequency: the same matrix, and the codes that occur most are the smallest."""

from __future__ import annotations

import pytest
import torch

from localq.formats.codebooks import aqlm, gather_order
from tests.support.kernels.gather_operands import aqlm_packed, shorts


def test_by_hand():
    codes = torch.tensor([[3, 1, 3], [-1, 2, 3]], dtype=torch.int16)  # -1 is 3, of 4 entries
    codebooks = torch.tensor([[[10.0], [11.0], [12.0], [13.0]]])
    gather_order.by_frequency_(codes, codebooks)
    assert codes.tolist() == [[0, 1, 0], [0, 2, 0]]
    assert codebooks.flatten().tolist() == [13, 11, 12, 10]


@pytest.mark.parametrize("layout", [(1, 65536, 1, 8), (1, 512, 1, 16)], ids=str)
def test_the_matrix_stays_the_same(layout, monkeypatch):
    monkeypatch.setattr(gather_order, "AT_A_TIME", 1000)
    packed = aqlm_packed((90, 544), torch.float16, 1, layout)
    packed.codes[::3] = shorts(50, *packed.codes[::3].shape, seed=2) - 7
    expected = aqlm.dequantize(packed, torch.float32)
    linear = aqlm.Linear(aqlm.Packed(packed.codes.clone(), packed.codebooks.clone(), packed.scales))
    assert linear.tile_() is linear
    assert torch.equal(aqlm.dequantize(linear.packed, torch.float32), expected)
    counts = torch.bincount(linear.codes.flatten().int() & 0xFFFF, minlength=layout[1])
    assert len(counts) == layout[1]
    assert (counts.diff() <= 0).all()
    again = linear.codes.clone()
    assert torch.equal(linear.tile_().codes, again)


def test_other_layouts_are_left_as_they_are():
    packed = aqlm_packed((90, 544), torch.float16, 1, (2, 256, 1, 8))
    linear = aqlm.Linear(packed)
    before = linear.codes.clone()
    assert torch.equal(linear.tile_().codes, before)
