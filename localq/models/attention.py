"""Attention over the static KV cache: grouped heads, rotary, windows, soft caps, and which slots a pass may see.

Shape letters of `layers.py`, and: groups = query heads per key/value head; span = the slots first..stop that a layer
looks at. Prefill never holds [heads, T, live] scores: the fused kernel of torch keeps them on the chip, and where a
soft cap rules that kernel out, or on the CPU a sink, the queries go in blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.models.config import DecoderConfig
from localq.models.layers import Cache, Linear, RMSNorm
from localq.models.rope import rotate

MASK_COLUMNS = 16  # torch's attention copies a mask unless its row stride is a multiple of 8 elements
FUSED_COLUMNS = 8  # torch's fused kernels take head widths that are a multiple of this
SCORE_BYTES = 64 * 2**20  # limit of the f32 scores of one query block without a fused kernel


class Span(NamedTuple):
    """Slots first..stop of the cache, and which of them each query sees.

    bias is [T, stop - first] in the dtype of the model, added to the scores: 0 = visible, -inf = hidden. None = every
    slot is visible, or, with `causal`, the first i + 1 to query i.
    """

    first: int
    stop: int
    bias: Tensor | None
    causal: bool


def host_start(positions: Tensor) -> int | None:
    """Return the first of `positions` if the host can read it without waiting or breaking a graph, else None."""
    return int(positions[0]) if positions.device.type == "cpu" else None


def visible(positions: Tensor, start: int | None, slots: Tensor, live: int, window: int, dtype: torch.dtype) -> Span:
    """Return the span that queries at `positions` int64 [T] (consecutive) see.

    A query at p sees slot s iff s <= p, and s > p - window if window > 0. `start` is `host_start(positions)`; `slots`
    is int64 0..capacity on the device. With a known start the span is as short as it can be and one token needs no
    bias; without, the span is 0..live and the bias says the rest.
    """
    queries = positions.shape[0]
    first, stop = 0, live
    if start is not None:
        first, stop = max(0, start + 1 - window) if window else 0, start + queries
        if queries == 1:
            return Span(first, stop, None, False)
    if queries == stop and (window == 0 or window >= stop):  # consecutive positions: this is the start of the text
        return Span(first, stop, None, True)
    hidden = slots[first:stop] > positions[:, None]
    if window:
        hidden |= slots[first:stop] <= positions[:, None] - window
    width = -(-hidden.shape[1] // MASK_COLUMNS) * MASK_COLUMNS
    bias = torch.zeros(queries, width, dtype=dtype, device=hidden.device)[:, : hidden.shape[1]]
    return Span(first, stop, bias.masked_fill_(hidden, -math.inf), False)


@dataclass(slots=True)
class Pass:
    """Inputs that all layers of one forward pass share.

    rotary   per kind of `Decoder.ropes`: cos and sin, each [T, 1, rotary_dim]
    spans    per window size
    query_scales   [T, 1, 1], multiply the queries; None: by one
    layer_inputs   [T, layers, width], added to the stream by blocks behind their MLP; None: nothing
    """

    positions: Tensor
    live: int
    cache: Cache
    rotary: list[tuple[Tensor, Tensor]]
    spans: dict[int, Span]
    query_scales: Tensor | None = None
    layer_inputs: Tensor | None = None


class Projected(NamedTuple):
    """Projections of x in a layer: q [T, heads * head_dim], k and v [T, kv_heads * head_dim], and a gate or None.

    The sigmoid of the gate, as many elements as q, multiplies what the heads gather.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None = None


class Attention(nn.Module):
    """Causal attention of one layer, with separate projections (llama and most others).

    gate_in_q  `q_proj` has, for every head, the rows of q and then those of its gate
    is_gated   a gate multiplies what the heads gather, so that a rotation of the values cannot be undone behind it
    output     the name of the linear that is added to the stream
    no_kernel  why no kernel computes it in a decode step; empty where one does
    """

    gate_in_q = False
    is_gated = False
    output = "o_proj"
    no_kernel = ""

    def __init__(self, config: DecoderConfig, layer: int, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.layer = layer
        self.heads, (self.kv_heads, self.head_dim) = config.heads, config.heads_of(layer)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.window = config.windows[layer]
        rope = config.ropes[layer]
        self.rope_kind = None if rope is None else config.rope_kinds.index(rope)
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.sinks else None
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = norm(self.head_dim, config.eps)
            self.k_norm = norm(self.head_dim, config.eps)
        self.add_projections(config)

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the linears of this layer."""
        query_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden, query_width, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.o_proj = Linear(query_width, config.hidden, bias=config.output_bias)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears that read x; their concatenated results are q, k and v, behind those of a `gate`."""
        return self.q_proj, self.k_proj, self.v_proj

    def gate(self) -> nn.Module | None:
        """Return the one of `inputs` that gives a gate, if it gives nothing else."""
        return None

    def wide_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Return the norms of q and of k over all heads together, if the family has these; `project` applies them."""
        return None

    def project(self, x: Tensor) -> Projected:
        """x [T, hidden] -> q, k, v, and a gate where the family has one."""
        return Projected(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def joined(self, q: Tensor, k: Tensor) -> Tensor:
        """q [T, heads, head_dim], k [T, kv_heads, head_dim] -> all heads, in the order of columns that `rotate` has."""
        return torch.cat((q, k), 1)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        tokens = x.shape[0]
        q, k, v, gate = self.project(x)
        q, k = q.view(tokens, self.heads, self.head_dim), k.view(tokens, self.kv_heads, self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_kind is not None:
            turned = rotate(self.joined(q, k), *step.rotary[self.rope_kind])  # one pass over both
            q, k = turned[:, : self.heads], turned[:, self.heads :]
        if step.query_scales is not None:
            q = q * step.query_scales
        v = v.view(tokens, self.kv_heads, self.head_dim)
        attended = self.attend(q, *step.cache.update(self.layer, k, v, step.positions, step.live), step)
        if gate is not None:
            attended = attended * torch.sigmoid(gate.reshape(attended.shape))
        projected: Tensor = self.o_proj(attended)
        return projected

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, step: Pass) -> Tensor:
        """q [T, heads, head_dim], keys and values [kv_heads, slots, head_dim] -> [T, heads * head_dim]."""
        span = step.spans[self.window]
        keys, values = keys[:, span.first : span.stop], values[:, span.first : span.stop]
        return attend(q, keys, values, span, self.scale, self.softcap, self.sinks)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """softmax(cap(q k^T scale)) v. q [T, heads, head_dim], keys and values [kv_heads, span, head_dim].

    sinks [heads], where there are any, are one more score of every query: exp(sink) joins the sum that the softmax
    divides by. Returns [T, heads * head_dim]. Keys and values are never repeated for the groups.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    if tokens == 1:
        grouped = q.view(kv_heads, heads // kv_heads, head_dim)
        if softcap or span.bias is not None or sinks is not None:
            sunk = None if sinks is None else sinks.view(kv_heads, heads // kv_heads, 1)
            return _attend(grouped, keys, values, span.bias, scale, softcap, sunk).view(1, heads * head_dim)
        # Everything is visible, so the heads of a group can stand as the queries of one head.
        attended = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], scale=scale)
        return attended.reshape(1, heads * head_dim)  # strided where a fused kernel of the GPU made it
    grouped = q.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    if softcap or (sinks is not None and (q.device.type == "cpu" or head_dim % FUSED_COLUMNS)):
        return _in_blocks(grouped, keys, values, span, scale, softcap, sinks)
    shape = (kv_heads, heads // kv_heads, keys.shape[1], head_dim)  # kv heads as batch: groups share keys by stride 0
    keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
    if sinks is not None:
        attended = _with_sinks(grouped, keys, values, span, scale, sinks)
    else:
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=span.bias, is_causal=span.causal, scale=scale
        )
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads * head_dim)


def _with_sinks(q: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float, sinks: Tensor) -> Tensor:
    """On a GPU, q [kv_heads, groups, T, head_dim], keys and values [kv_heads, groups, span, head_dim] -> as q.

    Torch's kernel returns the log-sum-exp of the scores, so the share of a sink is a factor applied afterwards:
    sum / (sum + exp(sink)) = sigmoid(log sum - sink).
    """
    kv_heads, groups, tokens, _ = q.shape
    bias = None if span.bias is None else span.bias.expand(kv_heads, groups, *span.bias.shape)
    attended, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, keys, values, bias, True, 0.0, span.causal, scale=scale
    )
    kept = torch.sigmoid(log_sum[..., :tokens] - sinks.float().view(kv_heads, groups, 1))  # its rows are padded
    scaled: Tensor = attended.mul_(kept.unsqueeze(-1))
    return scaled


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """The definition, with the scores in memory: q [kv_heads, rows, head_dim], bias [1 or rows, span] or None.

    sinks [kv_heads, rows, 1] or None.
    """
    if softcap or bias is None:
        scores = torch.baddbmm(q.new_zeros(()), q, keys.transpose(1, 2), beta=0, alpha=scale)  # [kv_heads, rows, span]
        if softcap:
            scores = scores.div_(softcap).tanh_()
            scores = scores * softcap if scores.requires_grad else scores.mul_(softcap)  # tanh's gradient needs tanh
        if bias is not None:
            scores += bias
    else:
        scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)
    if sinks is not None:
        return torch.bmm(torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1], values)
    return torch.bmm(torch.softmax(scores, -1), values)  # softmax sums in f32 whatever the dtype of the scores


def _in_blocks(
    q: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """As `_attend` for q [kv_heads, groups, T, head_dim], some queries at a time -> [T, heads * head_dim]."""
    kv_heads, groups, tokens, head_dim = q.shape
    slots = keys.shape[1]
    rows = max(1, SCORE_BYTES // (kv_heads * groups * slots * 4))
    bias = span.bias
    if bias is None:  # the start of the text
        bias = torch.full((tokens, slots), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    out = q.new_empty(tokens, kv_heads, groups, head_dim)
    for first in range(0, tokens, rows):
        block = q[:, :, first : first + rows]
        count = block.shape[2]
        seen = bias[first : first + count].repeat(groups, 1)  # rows of the block, once per group
        sunk = None if sinks is None else sinks.view(kv_heads, groups, 1).repeat_interleave(count, 1)
        part = _attend(block.reshape(kv_heads, groups * count, head_dim), keys, values, seen, scale, softcap, sunk)
        out[first : first + count] = part.view(kv_heads, groups, count, head_dim).permute(2, 0, 1, 3)
    return out.view(tokens, -1)
