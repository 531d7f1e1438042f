"""Which lane of the kernels that gather has which code, codeword and column: csrc/gather on paper.

The tensor instruction multiplies register by register what the four lanes of a row hold, so a row's product is the sum
over its lanes of 16 bytes of a codeword times 16 bytes of x. The kernels themselves are tested where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch
from gather_operands import aqlm_packed, unrounded, vptq_packed
from nf4_operands import inputs
from torch import Tensor

from localq.quant import vptq_codec

SLOTS, ITEM_WORDS = 8, 32  # codes of a lane in a row of an item; words of 8 columns
WARPS = 8


def by_slots(word: int, lanes: int) -> int:
    """`BySlots`: where word `word` of a row of x is staged."""
    item, within = divmod(word, ITEM_WORDS)
    t = within // (SLOTS * lanes) * lanes + within % lanes
    return item * ITEM_WORDS + within // lanes % SLOTS * 4 + t


@pytest.mark.parametrize("lanes", [1, 2])
def test_staged_words_of_x_are_a_permutation_in_which_lanes_lie_beside_each_other(lanes):
    assert sorted(by_slots(word, lanes) for word in range(96)) == list(range(96))


def row_product(codes: Tensor, book: Tensor, x: Tensor, staged: bool) -> float:
    """codes [groups], book [entries, group], x [in]: the sum of four lanes over all items and slots."""
    lanes, words = book.shape[1] // 8, len(x) // 8
    items = -(-words // ITEM_WORDS)
    memory = torch.zeros(items * ITEM_WORDS, 8)
    for word in range(words):
        memory[by_slots(word, lanes)] = x[8 * word : 8 * word + 8]
    total = 0.0
    for item in range(items):
        for t in range(4):
            for j in range(SLOTS):
                group = item * (ITEM_WORDS // lanes) + t // lanes * SLOTS + j
                code = int(codes[group]) if group < len(codes) else 0
                half = book[code, t % lanes * 8 : t % lanes * 8 + 8]
                if staged:
                    total += float(half @ memory[item * ITEM_WORDS + j * 4 + t])
                elif t // lanes * SLOTS + j < len(codes) - item * (ITEM_WORDS // lanes):
                    word = item * ITEM_WORDS + (t // lanes * SLOTS * lanes + t % lanes) + j * lanes
                    total += float(half @ x[8 * word : 8 * word + 8])
    return total


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize(("group", "columns"), [(8, 16), (8, 272), (8, 576), (16, 32), (16, 544)])
def test_codes_and_columns_of_aqlm_meet(group, columns, staged):
    packed = aqlm_packed((2, columns), torch.float32, 1, (1, 512, 1, group))
    x = inputs(1, columns, torch.float32)[0]
    codes = packed.codes[:, :, 0].int() & 511
    scales = packed.scales.view(-1)
    got = torch.tensor([row_product(row, packed.codebooks[0, :, 0], x, staged) for row in codes]) * scales
    torch.testing.assert_close(got, unrounded(packed) @ x, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("slots", [4, 8])
@pytest.mark.parametrize("scheme", [(8, 4096, 0), (8, 256, 16), (8, 65536, 65536), (16, 2, 0)])
def test_indices_are_cut_out_of_two_words(scheme, slots, lanes):
    """Items begin at whole words, so that what a word is shifted by follows from lane and slot alone."""
    packed = vptq_packed((32, 328), torch.float32, 1, scheme)
    _, count, residuals = scheme
    bits = vptq_codec.index_bits(count) + (vptq_codec.index_bits(residuals) if residuals else 0)
    words = packed.indices[0, 1].long() & 0xFFFFFFFF
    expected = vptq_codec.unpack(packed.indices[0, 1], 328, bits)
    step = 32 // lanes
    for column in range(328):
        item, within = divmod(column, slots * step)
        assert item * slots * step * bits % 32 == 0
        j, lane_column = divmod(within, step)
        shift = (lane_column + j * step) * bits % 32
        low = words[column * bits // 32]
        high = words[column * bits // 32 + 1] if shift + bits > 32 else 0
        assert int((low | high << 32) >> shift) & ((1 << bits) - 1) == int(expected[column])


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("rows", [1, 8])
def test_lanes_add_up_and_leave_every_sum_once(rows, lanes):
    """`add_lanes` and `leave`: a lane gives half of its sums away as long as it has several."""
    count = 8 * rows
    sums = torch.randn(32, count, dtype=torch.float64)
    now, held = sums.clone(), count
    mask = 16
    while mask >= lanes:
        kept, before = max(held // 2, 1), now.clone()
        for lane in range(32):
            upper = held > 1 and bool(lane & mask)
            for i in range(kept):
                own = before[lane, (i + kept) % held] if upper else before[lane, i]
                there = before[lane ^ mask]
                send = there[i] if held > 1 and (lane ^ mask) & mask else there[(i + kept) % held]
                now[lane, i] = own + send
        held, mask = kept, mask // 2
    step = 32 // lanes
    holders = min(count, step)
    share = torch.full((rows, 8 * lanes), torch.nan, dtype=torch.float64)
    for lane in range(32):
        column, part = lane // lanes, lane % lanes
        if column % (step // holders) == 0:
            for i in range(count // holders):
                value = column // (step // holders) * (count // holders) + i
                assert share[value // 8, part * 8 + value % 8].isnan()
                share[value // 8, part * 8 + value % 8] = now[lane, i]
    exact = sums.view(step, lanes, rows, 8).sum(0).permute(1, 0, 2).reshape(rows, 8 * lanes)
    torch.testing.assert_close(share, exact)


@pytest.mark.parametrize("items", [1, 3, 8, 21])
def test_shares_are_those_that_warps_left(items):
    """Item n of a block is warp n % 8's; the shares of a tile are read from the warp of its first item on."""
    left = {(n // items, n % WARPS) for n in range(5 * items)}
    read = {(tile, (tile * items + i) % WARPS) for tile in range(5) for i in range(min(items, WARPS))}
    assert read == left
