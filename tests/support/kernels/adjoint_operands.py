"""Matrices and codes for the adjoint of decoding, and what it must be, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def operands(rows: int, columns: int, stride: int, length: int, used: int = 256) -> tuple[Tensor, Tensor, int, int]:
    """Arguments of `vq_adjoint` on the CPU, with outliers; codes name the first `used` codewords alone."""
    generator = torch.Generator().manual_seed(rows * columns + stride)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix.view(-1)[::97] *= 100
    codes = torch.randint(used, (rows, columns // stride), generator=generator, dtype=torch.uint8)
    return matrix, codes, stride, length


def exact(matrix: Tensor, codes: Tensor, stride: int, length: int) -> tuple[Tensor, Tensor]:
    """f64 [256, length], and how far sums of f32 may be from it, whatever their order."""
    found, sizes, terms = (torch.zeros(256, length, dtype=torch.float64) for _ in range(3))
    for position in range(codes.shape[1]):
        window = matrix[:, stride * position : stride * position + length].double()
        numbers, width = codes[:, position].long(), window.shape[1]
        found[:, :width].index_add_(0, numbers, window)
        sizes[:, :width].index_add_(0, numbers, window.abs())
        terms[:, :width].index_add_(0, numbers, torch.ones_like(window))
    return found, 2**-24 * terms * sizes
