"""The rotation of the inputs of vq2 on a GPU: checks of the tensors, then the kernel on torch's stream."""

from __future__ import annotations

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place

COLUMNS = 16  # x has a multiple of them


def hadamard(x: Tensor, signs: Tensor, out: Tensor | None = None) -> Tensor:
    """H (signs * x), as `rotation.rotate` has it, bit for bit. x [rows, in] float16 or bfloat16 -> the same.

    signs u8 [in / 8], a set bit is a minus. `out` may be x. Raises ValueError by the argument's name. Bound by latency.
    """
    op = "hadamard"
    if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] < 1 or x.shape[1] % COLUMNS:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, must be [rows, a multiple of {COLUMNS}]")
    check(op, "x", x, signs.device, HALF_TYPES, x.numel())
    check(op, "signs", signs, x.device, (torch.uint8,), x.shape[1] // 8)
    if out is None:
        out = torch.empty_like(x)
    check(op, "out", out, x.device, (x.dtype,), x.numel())
    check_cuda(op, "signs", signs)
    rows, columns = x.shape
    kernels.module().hadamard(
        x=x.data_ptr(),
        signs=signs.data_ptr(),
        out=out.data_ptr(),
        type=TYPES[x.dtype],
        rows=rows,
        columns=columns,
        **place(x),
    )
    return out


def hadamard_bytes(rows: int, columns: int, itemsize: int = 2) -> int:
    """Bytes that `hadamard` must move: x in and out, the signs once."""
    return 2 * itemsize * rows * columns + columns // 8
