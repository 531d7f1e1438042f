"""Codes in tiles and codewords as fragments: the order that csrc/lookup/gemv.h describes, and the way back."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from localq.formats.codebooks import aqlm, vq2
from localq.formats.codebooks import tiles as codebook_tiles


@pytest.mark.parametrize("shape", [(1, 3), (16, 5), (37, 10, 2), (64, 7, 1)], ids=str)
def test_tiles_by_the_page(shape):
    codes = torch.randint(256, shape, dtype=torch.uint8)
    tiles = codebook_tiles.tile(codes)
    rows, (out, positions, *rest) = codes.view(*shape[:2], -1), shape
    books = rest[0] if rest else 1
    assert tiles.shape == (-(-out // 16) * 16 * positions * books,)
    for row, position, book in [(0, 0, 0), (out - 1, positions - 1, books - 1), (out // 2, positions // 2, 0)]:
        place = ((row // 16 * books + book) * positions + position) * 16 + row % 16
        assert tiles[place] == rows[row, position, book]
    assert torch.equal(codebook_tiles.untile(tiles, shape), codes)
    assert torch.equal(codebook_tiles.untile(tiles, shape, 16 * (out // 32)), codes[16 * (out // 32) :])


def test_whole_tiles_stay_in_place(monkeypatch):
    monkeypatch.setattr(codebook_tiles, "TILED_AT_A_TIME", 500)
    codes = torch.randint(256, (80, 10), dtype=torch.uint8)
    before, place = codes.clone(), codes.data_ptr()
    tiled = codebook_tiles.tile_(codes)
    assert (tiled.data_ptr(), tiled.shape) == (place, (80, 10))
    assert torch.equal(tiled.flatten(), codebook_tiles.tile(before))


def test_fragments_by_the_page():
    codebook = torch.randn(256, 20).half()
    factor = codebook_tiles.factor_of([codebook, codebook / 8])
    assert codebook.float().abs().sum(1).max() / factor == pytest.approx(0.75, abs=0.25)
    found = codebook_tiles.fragments(codebook, factor)
    assert (found.dtype, found.shape) == (torch.float16, (16, 2, 32, 8))
    for m, k, lane, r, i in [(3, 0, 17, 1, 1), (15, 1, 4, 0, 0), (0, 1, 6, 2, 0), (7, 0, 31, 3, 1)]:
        g, t = lane // 4, lane % 4
        weight, entry = 16 * k + 2 * t + i + 8 * (r // 2), 16 * m + g + 8 * (r % 2)
        expected = codebook[entry, weight] / factor if weight < 20 else 0.0
        assert found[m, k, lane, 2 * r + i] == expected


def test_small_codebooks_are_repeated():
    codebook = torch.randn(64, 8).half()
    assert torch.equal(codebook_tiles.fragments(codebook, 1.0)[:4], codebook_tiles.fragments(codebook, 1.0)[12:])
    with pytest.raises(ValueError, match="33 weights have no fragments"):
        codebook_tiles.fragments(torch.zeros(256, 33), 1.0)


def aqlm_linear(books: int) -> aqlm.Linear:
    codes = torch.randint(-128, 128, (83, 12, books), dtype=torch.int8)
    packed = aqlm.Packed(codes, torch.randn(books, 256, 1, 8).half(), 1 + torch.rand(83, 1, 1, 1).half())
    return aqlm.Linear(packed, torch.randn(83))


def vq2_linear(signs: bool) -> vq2.Linear:
    books = tuple(
        (torch.randint(256, (83, 96 // stride), dtype=torch.uint8), torch.randn(256, 16).half()) for stride in (4, 16)
    )
    bits = torch.randint(256, (12,), dtype=torch.uint8) if signs else None
    return vq2.Linear(vq2.Packed(books, 1 + torch.rand(83).half(), bits, (83, 96)))


LINEARS = {
    "1x8": lambda: aqlm_linear(1),
    "2x8": lambda: aqlm_linear(2),
    "vq2": lambda: vq2_linear(False),
    "rotated vq2": lambda: vq2_linear(True),
}


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_in_tiles_means_the_same(name):
    linear, x = LINEARS[name](), torch.randn(5, 96)
    packed, expected = linear.packed, linear(x)
    assert linear.tiles is None
    linear.put_into_tiles()
    assert linear.put_into_tiles() is linear
    assert torch.equal(linear(x), expected)
    for book in linear.books():
        assert linear.tiles.books[0].tile_positions >= linear.code_shapes[book.codes][1]
    assert torch.equal(type(linear)(packed).dequantized_rows(32, 51, torch.float32, None),
                       linear.dequantized_rows(32, 51, torch.float32, None))  # fmt: skip
    linear.scratch = torch.empty(20 * 96 * 4, dtype=torch.uint8)
    # The same products, added up in another order by a matrix of other height: 96 roundings of either.
    sums = x.abs() @ linear.dequantized_rows(0, expected.shape[1], torch.float32, None).abs().T
    assert ((linear(x) - expected).abs() <= 2 * 96 * 2**-24 * sums).all()


def test_layouts_without_a_kernel_stay_as_they_are():
    codes = torch.randint(-128, 128, (83, 3, 2), dtype=torch.int8)
    packed = aqlm.Packed(codes, torch.randn(2, 256, 1, 32).half(), torch.ones(83, 1, 1, 1).half())
    linear = aqlm.Linear(packed).put_into_tiles()
    assert linear.tiles is None
    x = torch.randn(2, 96)
    assert torch.equal(linear(x), F.linear(x, aqlm.dequantize(packed, torch.float32)))


def test_matrices_that_share_a_codebook_share_its_fragments():
    first, second = vq2_linear(False), vq2_linear(False)
    second.codebook, second.codebook_2 = first.codebook, first.codebook_2
    one, other = first.put_into_tiles().tiles, second.put_into_tiles().tiles
    assert [book.fragments.data_ptr() for book in one.books] == [book.fragments.data_ptr() for book in other.books]
