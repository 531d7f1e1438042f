"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): all heads make their keys and values from one latent.

After transformers' models/glm4_moe_lite/modeling_glm4_moe_lite.py. A token has a latent, normed, and one part of the
keys that turns and that heads share; the cache holds both, and no head. The matrix from latents to heads is never
applied to them: its rows for keys are applied to the queries (absorbed), q K l = (K^T q) l, and its rows for values to
the weighted sums of latents. Attention is then that of many heads which read one, whose keys are also the values.

Shape letters of `layers.py`, and: latent, rotary, value_dim of `LatentShape`, plain = head_dim - rotary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from localq.models.attention import Attention, Pass
from localq.models.config import DecoderConfig
from localq.models.layers import Linear, PlainLinear, RMSNorm
from localq.models.rope import rotate


@dataclass(frozen=True)
class LatentShape:
    """Sizes and facts of latent attention, in elements.

    latent        of keys and values
    query_latent  of queries; 0 = they are made from x at once
    rotary        the last columns of a head's queries and keys, which turn
    value_dim     of a head's values
    eps           of the norms of latents
    neighbours    the columns 2i and 2i + 1 turn together; else i and i + half
    """

    latent: int
    query_latent: int
    rotary: int
    value_dim: int
    eps: float
    neighbours: bool

    @property
    def cached(self) -> int:
        """Columns that the cache holds of a token."""
        return self.latent + self.rotary


@dataclass(frozen=True)
class LatentConfig(DecoderConfig):
    """Facts of a decoder with latent attention.

    head_dim   of queries and keys; there are as many KV heads as heads
    qkv_bias   of the matrices that make latents
    latents    the sizes; None only in a config that is not read to the end
    """

    latents: LatentShape | None = None


class LatentAttention(Attention):
    """Causal attention of one layer over latents.

    `kv_b_proj`, [heads * (plain + value_dim), latent], is in 16 bit in every format: its two halves are factors of
    other products than that of its Linear.
    """

    def add_projections(self, config: DecoderConfig) -> None:
        """Create the linears and norms of this layer."""
        assert isinstance(config, LatentConfig)
        assert config.latents is not None
        self.shape = shape = config.latents
        self.plain = self.head_dim - shape.rotary
        query_width = self.heads * self.head_dim
        if shape.query_latent:
            self.q_a_proj = Linear(config.hidden, shape.query_latent, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(shape.query_latent, shape.eps)
            self.q_b_proj = Linear(shape.query_latent, query_width, bias=False)
        else:
            self.q_proj = Linear(config.hidden, query_width, bias=False)
        self.kv_a_proj_with_mqa = Linear(config.hidden, shape.cached, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(shape.latent, shape.eps)
        self.kv_b_proj = PlainLinear(shape.latent, self.heads * (self.plain + shape.value_dim), bias=False)
        self.o_proj = Linear(self.heads * shape.value_dim, config.hidden, bias=config.output_bias)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears that read x."""
        return (self.q_a_proj if self.shape.query_latent else self.q_proj), self.kv_a_proj_with_mqa

    def queries(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, heads, head_dim], not turned."""
        q: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.shape.query_latent else self.q_proj(x)
        return q.view(x.shape[0], self.heads, self.head_dim)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        queries, kept = self.absorbed(x, step)
        cached = step.cache.update_latents(self.layer, kept, step.positions, step.live)
        del kept
        gathered = self.attend(queries, cached, cached, step).view(queries.shape)
        del queries
        _, values = self.factors()
        attended = torch.bmm(gathered[..., : self.shape.latent].transpose(0, 1), values.mT)  # [heads, T, value_dim]
        del gathered
        projected: Tensor = self.o_proj(attended.transpose(0, 1).flatten(1))
        return projected

    def factors(self) -> tuple[Tensor, Tensor]:
        """The parts of `kv_b_proj` that make keys [heads, plain, latent], and values [heads, value_dim, latent]."""
        by_head = self.kv_b_proj.weight.view(self.heads, -1, self.shape.latent)
        return by_head[:, : self.plain], by_head[:, self.plain :]

    def absorbed(self, x: Tensor, step: Pass) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> queries of latents [T, heads, latent + rotary]; what is kept of x [T, latent + rotary]."""
        assert self.rope_kind is not None
        width, (keys, _) = self.shape.latent, self.factors()
        # First, so that what is smaller leaves one hole behind it, where the results of attention find a place.
        found = x.new_empty(x.shape[0], self.heads, self.shape.cached)
        q = self.queries(x)
        latent, key = self.kv_a_proj_with_mqa(x).split((width, self.shape.rotary), -1)
        turning = torch.cat((q[..., self.plain :], key[:, None]), 1)  # the key as one more head
        if self.shape.neighbours:
            turning = turning.view(*turning.shape[:2], -1, 2).mT.flatten(2)
        turned = rotate(turning, *step.rotary[self.rope_kind])
        kept = torch.cat((self.kv_a_layernorm(latent), turned[:, -1]), -1)
        torch.bmm(q[..., : self.plain].transpose(0, 1), keys, out=found[..., :width].transpose(0, 1))
        found[..., width:] = turned[:, :-1]
        return found, kept
