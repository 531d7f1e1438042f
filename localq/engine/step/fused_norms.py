"""Norms of a decode step that no product has in front of it: launches of their own, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.step.launch import Launch
from localq.kernels import rmsnorm
from localq.kernels.gemv import Norm
from localq.models.attention import Attention
from localq.models.gemma4 import NormedAttention
from localq.models.layers import RMSNorm


def operand_of(norm: RMSNorm) -> Norm:
    """Return `norm` as kernels take it."""
    return Norm(norm.factor.detach(), norm.eps)


def known_norm(norm: RMSNorm | None) -> Norm:
    """Return a norm that a block has, as kernels take it."""
    assert norm is not None
    return operand_of(norm)


def norm_launch(x: Tensor, norm: RMSNorm, stream: Tensor | None = None) -> Launch:
    """stream += norm(x), or x = norm(x) without one; T [rows, width]."""
    factor, (rows, width) = operand_of(norm), x.shape
    moved = rmsnorm.rmsnorm_bytes(rows, width, residual=stream is not None, offset=factor.weight.dtype == torch.float32)
    out = x if stream is None else stream
    return Launch("norm", lambda: rmsnorm.rmsnorm(x, factor, residual=stream, out=out), lambda live: moved)


def wide_norms(part: Attention, qkv: Tensor) -> list[Launch]:
    """Norms of q and of k over all heads together, in T [rows, q k v behind each other]; none for most families."""
    if (norms := part.wide_norms()) is None:
        return []
    queries, keys = part.heads * part.head_dim, part.kv_heads * part.head_dim
    spans = slice(0, queries), slice(queries, queries + keys)
    rows = [qkv[row : row + 1] for row in range(qkv.shape[0])]  # one by one: v lies between them
    return [norm_launch(row[:, span], norm) for row in rows for span, norm in zip(spans, norms, strict=True)]


def value_norms(part: Attention, qkv: Tensor) -> list[Launch]:
    """Norms of values head by head, in T [rows, q k v behind each other]; none for most families.

    Where a layer has no matrix of values, they are the keys before their norm.
    """
    if not isinstance(part, NormedAttention) or part.source is not None:
        return []
    keys, width = part.heads * part.head_dim, part.kv_heads * part.head_dim
    first = keys if part.v_proj is None else keys + width
    factor, shape = operand_of(part.v_norm), (part.kv_heads, part.head_dim)
    moved = rmsnorm.rmsnorm_bytes(*shape, offset=True)

    def launch(row: Tensor) -> Launch:
        read, out = row[first : first + width].view(shape), row[keys + width :].view(shape)
        return Launch("norm", lambda: rmsnorm.rmsnorm(read, factor, out=out), lambda live: moved)

    return [launch(row) for row in qkv]
