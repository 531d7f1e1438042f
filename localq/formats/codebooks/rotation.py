"""The rotation of the inputs of a matrix: signs, then Hadamard blocks. It spreads outliers over a block of columns.

For a row x of n values, signs s (each 1 or -1) and H the block-diagonal matrix of normalized Hadamard matrices,

rotate(x)   = H (s * x)        what a product with rotated weights takes
unrotate(y) = s * (H y)        the way back: H is symmetric and its own inverse, and so is s

so that W x = (W s H) rotate(x) for W of n columns, and unrotate gives the rows of W from those of W s H.

block   the largest power of two that divides n, at most 4096: 576 = 9 * 64 has nine blocks of 64
H       Sylvester's: H[i, j] = (-1)^(number of bits set in i & j) / sqrt(block), within a block
signs   packed as u8 [n / 8]: bit i % 8 of byte i // 8 is set where s[i] is -1; n is a multiple of 8

Computed in f32 by butterflies of distances 1, 2, 4 and so on: (a, b) -> (a + b, a - b), each rounded; then one product
with f32(1 / sqrt(block)). The order is part of the definition: a CPU and a GPU agree in every bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_BLOCK = 4096
# Values that are rotated together: two and a half f32 of each are held at once.
CHUNK_VALUES = {"cpu": 2**18, "cuda": 2**21}


def block_of(columns: int) -> int:
    """Columns that a Hadamard block mixes, where there are so many in all."""
    return min(columns & -columns, LARGEST_BLOCK)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """x [..., n] of any float dtype, signs u8 [n / 8] -> the same shape and dtype, rounded once."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    factors = factors_of(signs)
    for part, target in _chunks(x, out):
        target.copy_(transform_(part.float() * factors))
    return out


def unrotate(y: Tensor, signs: Tensor) -> Tensor:
    """The inverse of `rotate`: y [..., n] -> the same shape and dtype, rounded once."""
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    for part, target in _chunks(y, out):
        target.copy_(unrotate_(part.to(torch.float32, copy=True), signs))
    return out


def unrotate_(y: Tensor, signs: Tensor) -> Tensor:
    """`unrotate` of f32 [..., n], contiguous, in place."""
    return transform_(y).mul_(factors_of(signs))


def transform_(y: Tensor) -> Tensor:
    """H y of f32 [..., n], contiguous, in place."""
    if y.dtype != torch.float32 or not y.is_contiguous():
        raise ValueError(f"hadamard: {y.dtype} {list(y.shape)} is not contiguous float32")
    block, distance = block_of(y.shape[-1]), 1
    while distance < block:
        first, second = y.view(-1, 2, distance).unbind(1)
        difference = first - second
        first += second
        second.copy_(difference)
        distance *= 2
    return y.mul_(block**-0.5)


def factors_of(signs: Tensor) -> Tensor:
    """u8 [n / 8] -> f32 [n] of 1 and -1."""
    bits = signs.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=signs.device)
    return 1 - 2 * (bits & 1).flatten().float()


def packed_signs(minus: Tensor) -> Tensor:
    """bool [n], true where the sign is -1, n a multiple of 8 -> u8 [n / 8]."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=minus.device)
    return (minus.reshape(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _chunks(x: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Rows of both, so many that the temporaries are bounded."""
    columns = x.shape[-1]
    rows = max(1, CHUNK_VALUES.get(x.device.type, 2**18) // columns)
    return list(zip(torch.split(x.reshape(-1, columns), rows), torch.split(out.view(-1, columns), rows), strict=True))
