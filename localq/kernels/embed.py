"""Rows of the embedding table, from the device or from pinned host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import HALF_TYPES, TYPES, check, check_cuda, place


def embed(ids: Tensor, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """out = table[ids] * scale, rounded once. ids i64 [rows] on the GPU, table T [vocab, hidden] -> T [rows, hidden].

    T is float16 or bfloat16, hidden % 8 == 0. The table may lie in pinned host memory: the kernel reads it there. Ids
    must be from 0 to vocab - 1; they are not checked. Works under CUDA graph capture. Bound by latency for few rows.
    """
    op = "embed"
    rows = ids.numel()
    if table.dim() != 2:
        raise ValueError(f"{op}: table has shape {tuple(table.shape)}, must be [vocab, hidden]")
    check(op, "ids", ids, ids.device, (torch.int64,), rows)
    check_cuda(op, "ids", ids)
    if table.is_cuda or not table.is_pinned():  # pinned memory has an address that kernels can read
        check(op, "table", table, ids.device, HALF_TYPES, table.numel())
    check(op, "table", table, table.device, HALF_TYPES, table.numel())
    hidden = table.shape[1]
    if out is None:
        out = torch.empty(rows, hidden, dtype=table.dtype, device=ids.device)
    check(op, "out", out, ids.device, (table.dtype,), rows * hidden)
    kernels.module().embed(
        ids=ids.data_ptr(),
        table=table.data_ptr(),
        scale=scale,
        out=out.data_ptr(),
        type=TYPES[table.dtype],
        rows=rows,
        hidden=hidden,
        **place(ids),
    )
    return out


def embed_bytes(rows: int, hidden: int) -> int:
    """Bytes that must move: ids, 16-bit rows in and out."""
    return rows * (8 + 2 * 2 * hidden)
