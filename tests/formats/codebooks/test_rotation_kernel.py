"""hadamard: what it refuses; on a GPU, bit for bit what `formats.codebooks.rotation` defines."""

from __future__ import annotations

import pytest
import torch

from localq.formats.codebooks.rotation import packed_signs, rotate
from localq.formats.codebooks.rotation_kernel import hadamard, hadamard_bytes
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.refusals import refused_by_name

X, SIGNS = inputs(3, 48, torch.float16), torch.zeros(6, dtype=torch.uint8)
REFUSED = {
    "a width that has no block": ({"x": X[:, :40].contiguous()}, r"must be \[rows, a multiple of 16\]"),
    "x of floats": ({"x": X.float()}, "x is torch.float32"),
    "x that is cut": ({"x": inputs(3, 96, torch.float16)[:, :48]}, "x has strides"),
    "too few signs": ({"signs": SIGNS[:5]}, r"signs has shape \(5,\), must have 6"),
    "a result of another type": ({"out": X.bfloat16()}, "out is torch.bfloat16"),
    "all on the CPU": ({}, "signs are on cpu, must be on a CUDA device"),
}


test_it_refuses_by_name = refused_by_name(hadamard, {"x": X, "signs": SIGNS}, REFUSED)


def test_bytes():
    assert hadamard_bytes(3, 48) == 2 * 2 * 3 * 48 + 6


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("columns", [16, 48, 576, 1536, 256 * 3, 512, 2048 * 3, 8192, 28672])
def test_it_is_the_definition_bit_for_bit(columns, rows, dtype):
    signs = packed_signs(torch.rand(columns, generator=torch.Generator().manual_seed(columns)) < 0.5)
    x = inputs(rows, columns, dtype)
    got = hadamard(x.cuda(), signs.cuda())
    assert torch.equal(bits(got.cpu()), bits(rotate(x, signs)))
    place = x.cuda()
    assert hadamard(place, signs.cuda(), out=place) is place
    assert torch.equal(bits(place), bits(got))
