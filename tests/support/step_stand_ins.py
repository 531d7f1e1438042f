"""What the kernels of a decode step compute, in torch on any device: lets the fused step run without a GPU.

Everything in the dtype of the operands (float32 in tests), without the kernels' roundings.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.models.attention import Span, attend
from localq.models.layers import ACTIVATIONS
from localq.models.rope import rotate


def normed(x: Tensor, norm: Any) -> Tensor:
    """weight * x / rms(x), or x without a norm."""
    if norm is None:
        return x
    return F.rms_norm(x, norm.weight.shape, norm.weight.to(x.dtype), norm.eps)


def dense_gemv(x, weights, *, biases=None, norm=None, residual=None, activation=None, out):
    """`kernels.dense.dense_gemv`."""
    biases = biases or [None] * len(weights)
    parts = [F.linear(normed(x, norm), weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if activation is not None:
        gate, up = parts
        parts = [ACTIVATIONS[activation](gate) * up]
    result = torch.cat(parts, -1)
    out.copy_(result if residual is None else residual + result)


def attention_decode(
    qkv, layer, position, *, heads, rotary, q_norm, k_norm, scale, softcap, window, workspace, out
) -> None:
    """`kernels.attention.attention_decode`; layer has k and v [kv_heads, capacity, head_dim]."""
    kv_heads, _, head_dim = layer.k.shape
    at = int(position)
    q, k, v = qkv.view(1, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    q, k = normed(q, q_norm), normed(k, k_norm)
    if rotary is not None:
        cos, sin = rotary[at : at + 1, :1], rotary[at : at + 1, 1:]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    layer.k[:, at], layer.v[:, at] = k[0], v[0]
    first = max(0, at + 1 - window) if window else 0
    keys, values = layer.k[:, first : at + 1], layer.v[:, first : at + 1]
    out.copy_(attend(q, keys, values, Span(first, at + 1, None, False), scale, softcap))


def embed(ids, table, *, scale, out) -> None:
    """`kernels.embed.embed`."""
    out.copy_(table[ids] * scale)


def rmsnorm(x, norm, residual=None, *, out) -> None:
    """`kernels.rmsnorm.rmsnorm`."""
    result = normed(x, norm)
    out.copy_(result if residual is None else residual + result)


def install(monkeypatch: Any) -> None:
    """Put them in the place of the kernels, for the fused step."""
    from localq.engine import fused, linears

    workspace = SimpleNamespace(bytes=lambda: 0)
    monkeypatch.setattr(linears.dense, "dense_gemv", dense_gemv)
    monkeypatch.setattr(fused.attention, "attention_decode", attention_decode)
    monkeypatch.setattr(fused.attention, "Workspace", lambda *arguments: workspace)
    monkeypatch.setattr(fused.embed, "embed", embed)
    monkeypatch.setattr(fused.rmsnorm, "rmsnorm", rmsnorm)
