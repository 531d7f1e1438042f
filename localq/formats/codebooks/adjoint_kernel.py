"""The adjoint of decoding additive codebooks: what every codeword gathers of a matrix. Checks, then the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from localq import kernels
from localq.formats.codebooks.search_kernel import ENTRIES
from localq.kernels.checks import check, check_cuda, place

OP = "vq_adjoint"
# Rows are cut into so many shares, whatever the GPU: as many as keep a large one busy.
SHARES = 1024
LONGEST = 32


def vq_adjoint(matrix: Tensor, codes: Tensor, stride: int, length: int) -> Tensor:
    """sums[k, j] = sum of matrix[r, stride h + j] over all r, h with codes[r, h] = k, where that column is there.

    matrix f32 [rows, positions * stride], codes u8 [rows, positions], on one GPU -> f32 [256, length], length <= 32.
    It is the gradient of <matrix, decoded weights> to a codebook. Sums have one order. Raises ValueError by the
    argument's name.

    Bound by the latency of shared memory (csrc/search/adjoint.cu); `vq_adjoint_bytes` are what it must read.
    """
    rows, positions = codes.shape if codes.dim() == 2 else (0, 0)
    check(OP, "codes", codes, codes.device, (torch.uint8,), rows * positions)
    check(OP, "matrix", matrix, codes.device, (torch.float32,), rows * positions * stride)
    check_cuda(OP, "codes", codes)
    if not 1 <= length <= LONGEST:
        raise ValueError(f"{OP}: length = {length}, must be from 1 to {LONGEST}")
    shares = min(rows, SHARES)
    sums = torch.empty(shares, ENTRIES, length, device=codes.device)
    kernels.module().vq_adjoint(
        matrix=matrix.data_ptr(),
        codes=codes.data_ptr(),
        sums=sums.data_ptr(),
        rows=rows,
        columns=positions * stride,
        stride=stride,
        length=length,
        shares=shares,
        **place(codes),
    )
    return sums.sum(0)


def vq_adjoint_bytes(rows: int, columns: int, stride: int) -> int:
    """Bytes that `vq_adjoint` must read."""
    return 4 * rows * columns + rows * (columns // stride)
