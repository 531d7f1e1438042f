"""The tiled order of AWQ and GPTQ: a word by hand, every nibble as in csrc/int4/layout.cuh, and back bit for bit."""

from __future__ import annotations

import pytest
import torch

from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import tiles as int4_tiles
from tests.support.kernels.int4_operands import packed_of


@pytest.mark.parametrize(("shape", "group"), [((16, 64), 64), ((48, 192), 32), ((32, 576), 128), ((16, 576), 576)])
def test_every_nibble_and_scale_is_at_its_place(shape, group):
    packed = packed_of(shape, group, seed=1)
    tiled = int4_tiles.tile(packed)
    (out, columns), groups = shape, packed.scales.shape[0]
    codes, zeros = int4_codec.nibbles(packed.codes), int4_codec.nibbles(packed.zeros)
    words = tiled.codes.flatten().view(torch.int32).long() & 0xFFFFFFFF
    for row in range(out):
        tile, g, half = row // 16, row % 8, row % 16 // 8
        for column in range(columns):
            block, upper, t, word, pair, odd = (
                column // 64, column % 64 // 32, column % 32 // 8, column % 8 // 4, column % 4 // 2, column % 2
            )  # fmt: skip
            at = ((tile * (columns // 64) + block) * 32 + 4 * g + t) * 4 + 2 * upper + word
            assert int(words[at]) >> (4 * (4 * odd + 2 * pair + half)) & 15 == int(codes[row, column])
        for of in range(groups):
            at = (tile * groups + of) * 8 + g
            assert tiled.scales.flatten()[2 * at + half] == packed.scales[of, row]
            assert int(tiled.zeros.flatten()[at]) >> (4 * half) & 15 == int(zeros[of, row])


@pytest.mark.parametrize("scales", [torch.float16, torch.float32], ids=str)
def test_in_place_and_back_by_slabs(scales, monkeypatch):
    monkeypatch.setattr(int4_tiles, "TILED_AT_A_TIME", 20 * 320)  # one tile at a time
    packed = packed_of((112, 320), 64, seed=2, scales=scales, act_order=True)
    tiled = int4_tiles.tile(packed)
    back = int4_tiles.untile(tiled)
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(back, name), getattr(packed, name))
    part = int4_tiles.untile_rows(tiled, 32, 48)
    expected = int4_codec.dequantize(packed, torch.float32)[32:80]
    assert torch.equal(int4_codec.dequantize(part, torch.float32), expected)
    held = [each.data_ptr() for each in (packed.codes, packed.scales, packed.zeros)]
    int4_tiles.tile_(packed)
    assert [each.data_ptr() for each in (packed.codes, packed.scales, packed.zeros)] == held
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(packed, name), getattr(tiled, name))


@pytest.mark.parametrize(("shape", "whole"), [((16, 64), True), ((24, 64), False), ((32, 96), False)])
def test_matrices_of_whole_tiles(shape, whole):
    assert int4_tiles.tiles(shape) == whole
