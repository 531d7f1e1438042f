"""Why nf4_gemv may read codes as they lie: the index mappings of its two kernels on paper, run on the CPU.

The tensor instruction's layout is that of the PTX manual (m16n8k16, f16): lane 4g + t holds of A the pairs (g, 2t),
(g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), of B the pairs (2t, g), (2t + 8, g), of the result (g, 2t), (g, 2t + 1),
(g + 8, 2t), (g + 8, 2t + 1). The kernel gives it bytes 2j and 2j + 1 of a lane's eight codes instead of columns in
order, and the same columns of x. With one row of x, the eight columns of B are x of eight blocks, and of the product of
block u column u counts. The kernels themselves are tested where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch
from nf4_operands import inputs, operands
from torch import Tensor

from localq.quant import nf4

TILE, ROWS = 16, 8


def tensor_instruction(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """Registers a [4] and b [2] of all lanes, each a pair [32, 2] -> the result's four numbers, each [32]."""
    matrix_a, matrix_b = torch.zeros(16, 16), torch.zeros(16, 8)
    lanes = [(lane, lane // 4, lane % 4) for lane in range(32)]
    for lane, g, t in lanes:
        for high in (0, 1):
            matrix_a[g, 2 * t + high], matrix_a[g + 8, 2 * t + high] = a[0][lane, high], a[1][lane, high]
            matrix_a[g, 2 * t + 8 + high], matrix_a[g + 8, 2 * t + 8 + high] = a[2][lane, high], a[3][lane, high]
            matrix_b[2 * t + high, g], matrix_b[2 * t + 8 + high, g] = b[0][lane, high], b[1][lane, high]
    product = matrix_a @ matrix_b
    places = [(0, 0), (0, 1), (8, 0), (8, 1)]
    return [torch.stack([product[g + down, 2 * t + right] for _, g, t in lanes]) for down, right in places]


def sum_tile(codes: Tensor, scales: Tensor, x: Tensor, tile: int) -> Tensor:
    """codes u8 [out, in/2], scales f32 [out, in/64], x f32 [rows, in] -> the tile's part of y, [8, 16]."""
    out, blocks = scales.shape
    pairs = nf4.CODE_MAP[torch.stack((codes >> 4, codes & 15), dim=-1).int()]  # [out, in/2, 2]: high nibble first
    g, t = torch.arange(32) // 4, torch.arange(32) % 4
    low, high = (torch.clamp(tile * TILE + g + down, max=out - 1) for down in (0, 8))
    padded = torch.cat((x, torch.zeros(ROWS - len(x), x.shape[1])))
    sums = [torch.zeros(32) for _ in range(4)]
    for block in range(blocks):
        for j in range(4):
            byte = 32 * block + 8 * t + 2 * j
            a = [pairs[low, byte], pairs[high, byte], pairs[low, byte + 1], pairs[high, byte + 1]]
            column = 64 * block + 16 * t + 4 * j
            b = [padded[g[:, None], column[:, None] + torch.tensor(offsets)] for offsets in ((0, 1), (2, 3))]
            for i, part in enumerate(tensor_instruction(a, b)):
                sums[i] += scales[low if i < 2 else high, block] * part
    y = torch.zeros(ROWS, TILE)
    for i, each in enumerate(sums):
        y[2 * t + i % 2, g + 8 * (i // 2)] = each
    return y


def sum_chunk_of_one_row(codes: Tensor, scales: Tensor, x: Tensor) -> Tensor:
    """codes u8 [16, 256], scales f32 [16, 8], x f32 [512] -> y [16]: one item of csrc/nf4/gemv.cu."""
    pairs = nf4.CODE_MAP[torch.stack((codes >> 4, codes & 15), dim=-1).int()]
    g, t = torch.arange(32) // 4, torch.arange(32) % 4
    sums = torch.zeros(2, 32)
    for block in range(8):
        product = [torch.zeros(32) for _ in range(4)]
        for j in range(4):
            byte = 32 * block + 8 * t + 2 * j
            a = [pairs[g, byte], pairs[g + 8, byte], pairs[g, byte + 1], pairs[g + 8, byte + 1]]
            column = 64 * g + 16 * t + 4 * j  # column g of B: x of block g, whatever block W is of
            b = [x[column[:, None] + torch.tensor(offsets)] for offsets in ((0, 1), (2, 3))]
            for i, part in enumerate(tensor_instruction(a, b)):
                product[i] += part
        counts = t == block // 2
        sums[0] += counts * scales[g, block] * product[block % 2]
        sums[1] += counts * scales[g + 8, block] * product[2 + block % 2]
    return sums.view(2, 8, 4).sum(-1).view(16)


def test_eight_blocks_of_one_row_share_the_columns_of_x():
    weight = operands((16, 512), seed=4)
    x = inputs(1, 512, torch.float32)
    y = sum_chunk_of_one_row(weight.packed.codes, nf4.absmax_f32(weight.packed).view(16, 8), x[0])
    torch.testing.assert_close(y, (x @ weight.dense.T)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("out", "columns", "rows"), [(16, 64, 8), (21, 192, 3)], ids=str)
def test_the_mapping_gives_the_product(out, columns, rows):
    weight = operands((out, columns))
    x = inputs(rows, columns, torch.float32)
    scales = nf4.absmax_f32(weight.packed)
    tiles = [sum_tile(weight.packed.codes, scales, x, tile) for tile in range(-(-out // TILE))]
    y = torch.cat(tiles, dim=1)
    torch.testing.assert_close(y[:rows, :out], x @ weight.dense.T, rtol=1e-5, atol=1e-5)
    assert (y[rows:] == 0).all()  # rows of the instruction that x does not have
