"""RMSNorm outside a matrix-vector product: what families with norms behind attention and MLP need."""

from __future__ import annotations

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place
from localq.kernels.gemv import Norm


def rmsnorm(x: Tensor, norm: Norm, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """out = residual + norm(x), the norm rounded before it is added. All T [rows, width], width % 8 == 0.

    T is float16 or bfloat16. `out` may be the residual or x itself. Works under CUDA graph capture; sums in f32 in a
    fixed order. Memory-bound: `rmsnorm_bytes` over the memory bandwidth is the floor.
    """
    op = "rmsnorm"
    if x.dim() != 2:
        raise ValueError(f"{op}: x has shape {tuple(x.shape)}, must be [rows, width]")
    rows, width = x.shape
    check(op, "x", x, x.device, HALF_TYPES, rows * width)
    check(op, "norm weight", norm.weight, x.device, (x.dtype, torch.float32), width)
    if residual is not None:
        check(op, "residual", residual, x.device, (x.dtype,), rows * width)
    if out is None:
        out = torch.empty_like(x)
    check(op, "out", out, x.device, (x.dtype,), rows * width)
    check_cuda(op, "x", x)
    kernels.module().rmsnorm(
        x=x.data_ptr(),
        norm=1 + (norm.weight.dtype == torch.float32),
        weight=norm.weight.data_ptr(),
        eps=norm.eps,
        residual=0 if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        type=TYPES[x.dtype],
        rows=rows,
        width=width,
        **place(x),
    )
    return out


def rmsnorm_bytes(rows: int, width: int, residual: bool = False, offset: bool = False) -> int:
    """Bytes that must move: x, out and the residual in 16 bits, the weight in 16 or (`offset`) 32."""
    return rows * width * (6 if residual else 4) + width * (4 if offset else 2)
