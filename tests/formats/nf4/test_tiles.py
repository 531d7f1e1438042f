"""The tiled order against its definition, element by element, and back."""

from __future__ import annotations

import pytest
import torch

from localq.formats.nf4 import tiles as nf4_tiles

SHAPES = [(16, 64), (15, 128), (48, 576), (33, 512), (17, 1088), (32, 1024)]


def expected_codes(codes, shape):
    """As the page of facts of csrc/nf4/layout.cuh has it."""
    out, blocks = shape[0], shape[1] // 64
    result = codes.clone().view(-1)
    for row in range(out // 16 * 16):
        tile, in_tile = divmod(row, 16)
        half, g = divmod(in_tile, 8)
        for column in range(32 * blocks):
            block, in_block = divmod(column, 32)
            t, byte = divmod(in_block, 8)
            result[((tile * blocks + block) * 32 + 4 * g + t) * 16 + 8 * half + byte] = codes[row, column]
    return result.view_as(codes)


def expected_absmax(absmax, shape):
    out, blocks = shape[0], shape[1] // 64
    result = absmax.clone()
    for row in range(out // 16 * 16):
        tile, in_tile = divmod(row, 16)
        half, g = divmod(in_tile, 8)
        for block in range(blocks):
            chunk, inside = divmod(block, 8)
            first, n = (tile * blocks + 8 * chunk) * 16, min(8, blocks - 8 * chunk)
            place = (4 * g + inside // 2) * 4 + 2 * half + inside % 2 if n == 8 else in_tile * n + inside
            result[first + place] = absmax[row * blocks + block]
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tiled_order_is_the_one_that_the_kernels_read(shape, dtype):
    count = shape[0] * shape[1]
    codes = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8)
    absmax = torch.randperm(count // 64).to(dtype)
    tiled = nf4_tiles.tile(codes, absmax, shape)
    assert torch.equal(tiled[0], expected_codes(codes, shape))
    assert torch.equal(tiled[1], expected_absmax(absmax, shape))
    back = nf4_tiles.untile(*tiled, shape)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], absmax)
