"""Mamba-2: a layer that mixes tokens by a matrix per head, which every token lets fade and writes to.

After "Transformers are SSMs" (arXiv 2405.21060) and transformers' models/nemotron_h/modeling_nemotron_h.py. A token
changes the matrix S [state, head_dim] of each head, and reads it, all in f32:

    S = exp(-dt exp(A_log)) S + B (dt x)^T;  y = S^T C + D x

Shape letters of `layers.py`, and: H heads, G groups, whose heads share B and C, N = state, P = head_dim. One matrix
gives the gate z, what is convolved (x, B and C, whose last inputs are part of the state) and dt, which becomes
softplus(dt + dt_bias). One token does what is written above; more go in chunks, of which products of matrices do the
same at once (section 6 of the paper). The chunks are few tokens each, one after the other, so that what lies in memory
beside the inputs does not grow with the pass.

Passes of many tokens of the reference keep dt above `time_step_min`; its pass of one token does not, nor did the
training, so neither do these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.files.layer_caches import RecurrentState
from localq.files.mamba_memory import CHUNK
from localq.models.attention import Pass
from localq.models.config import malformed_error
from localq.models.layers import DraftedInputs, LayerState, Linear, RMSNorm
from localq.models.recurrent import RecurrentLayer, ShortConvolution

IN_F32 = (".A_log", ".D", ".dt_bias")  # parameters that stay in f32; A_log is exponentiated twice


@dataclass(frozen=True)
class MambaShape:
    """The shape of the Mamba-2 layers of a model.

    heads, head_dim   columns of z and x of a token
    groups            heads is a multiple of it, and head h reads B and C of group h * groups // heads
    state             rows of the matrix of a head
    kernel            tokens that the convolution sees
    norm_groups       into which the norm divides the columns
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    norm_groups: int

    def __post_init__(self) -> None:
        """Raise LocalqError (exit 8) for heads that groups cannot share."""
        if self.heads % self.groups:
            raise malformed_error("n_groups", f"{self.groups} does not divide the number of Mamba heads, {self.heads}")

    @property
    def width(self) -> int:
        """Columns of z, of x, and of the result, of a token."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns of x, B and C of a token."""
        return self.width + 2 * self.groups * self.state

    @property
    def cache(self) -> RecurrentState:
        """The cache of one layer."""
        return RecurrentState(self.heads, self.state, self.head_dim, self.channels, self.kernel - 1)


class GatedRMSNorm(RMSNorm):
    """weight * g / rms(g) with g = x silu(gate), of each group of columns by itself, in f32 and rounded last."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__(width, eps)
        self.groups = groups

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x f32 [T, width], which is written over, gate [T, width] -> the same shape, in the dtype of the gate."""
        grouped = x.mul_(F.silu(gate.float())).view(len(x), self.groups, -1)
        normed = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).view(x.shape)
        return normed.mul_(self.weight).to(gate.dtype)


class Mamba2(RecurrentLayer):
    """A layer with such heads: x -> y of every head, gated, normed and projected; `output` as of `Attention`."""

    output = "out_proj"

    def __init__(self, shape: MambaShape, hidden: int, layer: int, eps: float) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.in_proj = Linear(hidden, shape.width + shape.channels + shape.heads, bias=False)
        self.conv1d = ShortConvolution(shape.channels, shape.kernel, bias=True)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(shape.heads)) for _ in range(3))
        self.norm = GatedRMSNorm(shape.width, shape.norm_groups, eps)
        self.out_proj = Linear(shape.width, hidden, bias=False)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears that read x."""
        return (self.in_proj,)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the state of this layer moves on by the tokens that are not drafted."""
        shape, state, drafted = self.shape, step.cache.state(self.layer), step.cache.drafted(self.layer)
        gate, inputs, steps = self.in_proj(x).split((shape.width, shape.channels, shape.heads), -1)
        given = DraftedInputs(inputs, *self.rates(steps))
        if drafted is None:
            gated = self.chunks(given, gate, state)
        else:
            gated = self.norm.gated(self.look_ahead(given, state, drafted), gate)
        projected: Tensor = self.out_proj(gated)
        return projected

    def chunks(self, given: DraftedInputs, gate: Tensor, state: LayerState) -> Tensor:
        """The outputs of the heads for T tokens, gated and normed [T, H * P]; `state` moves on by all of them."""
        out = gate.new_empty(gate.shape)
        for first in range(0, len(gate), CHUNK):
            some = slice(first, first + CHUNK)
            inputs, decay, beta = (part[some] for part in given)
            read = self.advance(torch.cat((state.columns.T, inputs)), decay, beta, state)
            out[some] = self.norm.gated(read, gate[some])
        return out

    def rates(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """dt before its softplus [T, H] -> the logarithm of what stays of the matrix, and dt, both f32 [T, H]."""
        dt = F.softplus(steps.float() + self.dt_bias.float())
        return -self.A_log.float().exp() * dt, dt

    def advance(self, inputs: Tensor, decay: Tensor, beta: Tensor, state: LayerState) -> Tensor:
        """See `RecurrentLayer.advance`; up to CHUNK tokens, and beta is dt. Returns y f32 [T, H * P]."""
        x, keys, queries = self._convolved(inputs)
        rule = token if len(decay) == 1 else chunk
        y = rule(queries, keys, x * beta[..., None], decay, state.matrix)
        state.columns.copy_(inputs[len(decay) :].T)
        return y.addcmul_(x, self.D.float()[:, None]).flatten(-2)

    def _convolved(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs [columns + T, C] -> x [T, H, P], B and C [T, G, N], f32."""
        shape = self.shape
        found = self.conv1d(inputs, slice(None)).float()
        x, *both = found.split((shape.width, *(shape.groups * shape.state,) * 2), -1)
        keys, queries = (each.view(-1, shape.groups, shape.state) for each in both)
        return x.view(-1, shape.heads, shape.head_dim), keys, queries


def token(queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, matrix: Tensor) -> Tensor:
    """The rule for one token. C and B [1, G, N], dt x [1, H, P], decay [1, H] -> S^T C [1, H, P].

    matrix [H, N, P] is changed in place, without a wait for the device; all are f32.
    """
    groups, shared = keys.shape[1], values.shape[1] // keys.shape[1]
    matrix.mul_(decay[0].exp()[:, None, None])
    of_groups = matrix.view(groups, shared, *matrix.shape[1:])
    of_groups.addcmul_(keys[0, :, None, :, None], values.view(groups, shared, 1, -1))
    return torch.matmul(queries[0, :, None, None], of_groups).view(values.shape)


def chunk(queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, matrix: Tensor) -> Tensor:
    """As `token` for T tokens: C and B [T, G, N], dt x [T, H, P], decay [T, H] -> [T, H, P].

    With G_i the sum of the decays up to token i, y_i = exp(G_i) S^T C_i + sum over j <= i of exp(G_i - G_j) (C_i B_j)
    dt_j x_j. G_i - G_j is summed anew for every j: heads that forget fast have a G of some hundreds, whose difference
    would have lost its last digits.
    """
    tokens, groups, _ = keys.shape
    heads = values.shape[1]
    q, k = (each.transpose(0, 1)[:, None] for each in (queries, keys))  # [G, 1, T, N]
    v = values.view(tokens, groups, heads // groups, -1).permute(1, 2, 0, 3)  # [G, R, T, P]
    steps = decay.view(tokens, groups, -1).permute(1, 2, 0)[..., None]  # [G, R, T, 1]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu()  # j >= i
    between = steps.expand(-1, -1, -1, tokens).masked_fill(later, 0).cumsum_(2)
    between = between.masked_fill_(later.triu(1), -torch.inf).exp_()
    since, until = steps.cumsum(2).exp_(), between[..., -1:, :].mT  # [G, R, T, 1]
    held = matrix.view(groups, heads // groups, *matrix.shape[1:])
    out = torch.matmul(q, held).mul_(since)
    writes = v * until
    out += torch.matmul(between.mul_(q @ k.mT), v)
    held.mul_(since[..., -1:, :]).add_(torch.matmul(k.mT, writes))
    return out.flatten(0, 1).transpose(0, 1)
