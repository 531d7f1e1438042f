"""The gated delta net: a layer that mixes tokens by a matrix per head instead of by keys and values of all of them.

After "Gated Delta Networks" (arXiv 2412.06464) and transformers' models/qwen3_5/modeling_qwen3_5.py. A token reads and
corrects the matrix S [key_dim, value_dim] of each value head, all in f32, where k and q have the length 1:

    S = exp(g) S;  S += k (beta (v - S^T k))^T;  o = S^T q

Shape letters of `layers.py`, and: H key heads, R value heads that share one of them, K = key_dim, V = value_dim.
q, k and v pass a short causal convolution first, whose last inputs are part of the state. One token does what is
written above; more go in chunks, which turn the recurrence within a chunk into products of matrices (section 3.3 of
the paper, the WY form), some heads at a time, so that what lies in memory beside x does not grow with the heads.
On a GPU in 16 bit, passes of many tokens go through kernels instead (`kernels.delta_net.delta_prefill`).

Drafted tokens go one by one from a copy of the state (`recurrent`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq import kernels
from localq.files import delta_memory
from localq.files.delta_memory import CHUNK
from localq.files.layer_caches import RecurrentState
from localq.kernels import delta_net
from localq.kernels.checks import HALF_TYPES
from localq.kernels.delta_net import DeltaWeights
from localq.models.attention import Pass
from localq.models.layers import DraftedInputs, LayerState, Linear, PlainLinear, RMSNorm
from localq.models.recurrent import RecurrentLayer, ShortConvolution

EPSILON = 1e-6  # beside the squared length of q and k


@dataclass(frozen=True)
class DeltaShape:
    """The shape of the gated delta nets of a model.

    key_heads, value_heads   value_heads is a multiple of key_heads, and value head j reads q and k of head
                             j * key_heads // value_heads
    key_dim, value_dim       of a head
    kernel                   tokens that the convolution sees
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Columns of q, k and v of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def cache(self) -> RecurrentState:
        """The cache of one layer."""
        return RecurrentState(self.value_heads, self.key_dim, self.value_dim, self.channels, self.kernel - 1)

    def group_heads(self, tokens: int) -> int:
        """Key heads that go through the rule together in a pass of `tokens`."""
        shared = self.value_heads // self.key_heads
        return delta_memory.group_heads(tokens, self.key_heads, shared, self.key_dim, self.value_dim)

    def why_no_kernel(self) -> str:
        """Return why no kernel can serve this shape; empty if one can."""
        return delta_net.why_not(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.kernel)


class GatedDeltaNet(RecurrentLayer):
    """A layer with such heads: x -> o of every head, normed, times silu(z), and projected."""

    def __init__(self, shape: DeltaShape, hidden: int, layer: int, eps: float) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        width = shape.value_heads * shape.value_dim
        self.in_proj_qkv = Linear(hidden, shape.channels, bias=False)
        self.in_proj_z = Linear(hidden, width, bias=False)
        self.in_proj_b = PlainLinear(hidden, shape.value_heads, bias=False)
        self.in_proj_a = PlainLinear(hidden, shape.value_heads, bias=False)
        self.conv1d = ShortConvolution(shape.channels, shape.kernel)
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads))
        self.A_log = nn.Parameter(torch.empty(shape.value_heads))
        self.norm = RMSNorm(shape.value_dim, eps)
        self.out_proj = Linear(width, hidden, bias=False)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears that read x."""
        return self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the state of this layer moves on by the tokens that are not drafted."""
        state, drafted = step.cache.state(self.layer), step.cache.drafted(self.layer)
        if x.shape[0] > 1 and drafted is None and self.has_kernel(x):
            gated = self.prefill(x, state)
        else:
            read = self.read(x, state) if drafted is None else self.verify(x, state, drafted)
            gate = F.silu(self.in_proj_z(x).view(read.shape).float())
            gated = (self.norm(read) * gate).to(x.dtype).view(x.shape[0], -1)
        projected: Tensor = self.out_proj(gated)
        return projected

    def has_kernel(self, x: Tensor) -> bool:
        """Return whether `prefill` can run: on a GPU, in 16 bit, for a shape with kernels, and without gradients."""
        alike = x.dtype in HALF_TYPES and x.dtype == self.conv1d.weight.dtype == self.norm.weight.dtype
        if not (x.is_cuda and alike) or torch.is_grad_enabled():
            return False
        return kernels.available() and not self.shape.why_no_kernel()

    def prefill(self, x: Tensor, state: LayerState) -> Tensor:
        """x [T, hidden] -> what the heads read, normed and gated, [T, value heads * V]; by kernels, as `read`."""
        taps = self.conv1d.weight.view(self.shape.channels, self.shape.kernel)
        rates, offsets = -self.A_log.float().exp(), self.dt_bias.float()
        weights = DeltaWeights(taps, rates, offsets, self.norm.weight, self.norm.eps, self.shape.key_heads)
        inputs = (self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x))
        return delta_net.delta_prefill(*inputs, weights, state.columns, state.matrix)

    def rates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> g, the logarithm of what stays of the matrix, and beta, both f32 [T, value heads]."""
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        return decay, torch.sigmoid(self.in_proj_b(x)).float()

    def read(self, x: Tensor, state: LayerState) -> Tensor:
        """x [T, hidden] -> o [T, value heads, V] in the dtype of x; `state` is changed in place."""
        inputs, (decay, beta) = torch.cat((state.columns.T, self.in_proj_qkv(x))), self.rates(x)
        return self.advance(inputs, decay, beta, state)

    def verify(self, x: Tensor, state: LayerState, drafted: DraftedInputs) -> Tensor:
        """As `read`, but `state` moves on by the first token alone; the inputs of the others go into `drafted`."""
        rows = (x[row : row + 1] for row in range(x.shape[0]))
        rates = zip(*map(self.rates, rows), strict=True)  # several rows at once may round otherwise
        return self.look_ahead(DraftedInputs(self.in_proj_qkv(x), *map(torch.cat, rates)), state, drafted)

    def advance(self, inputs: Tensor, decay: Tensor, beta: Tensor, state: LayerState) -> Tensor:
        """As `read`; inputs of the convolution [columns + T, C], decay and beta as of `rates`."""
        shape, tokens = self.shape, decay.shape[0]
        shared = shape.value_heads // shape.key_heads
        out = inputs.new_empty(tokens, shape.value_heads, shape.value_dim)
        count = shape.key_heads if tokens == 1 else shape.group_heads(tokens)
        for first in range(0, shape.key_heads, count):
            last = min(first + count, shape.key_heads)
            values = slice(first * shared, last * shared)
            parts = self._heads(inputs, first, last)
            rule = token if tokens == 1 else chunks
            out[:, values] = rule(*parts, decay[:, values], beta[:, values], state.matrix[values])
        state.columns.copy_(inputs[tokens:].T)
        return out

    def _heads(self, inputs: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [T, heads, K] and v [T, value heads, V], f32, of the key heads first..last."""
        shape = self.shape
        keys, key_dim, shared = shape.key_heads * shape.key_dim, shape.key_dim, shape.value_heads // shape.key_heads
        value_dim = shared * shape.value_dim
        spans = (
            slice(first * key_dim, last * key_dim),
            slice(keys + first * key_dim, keys + last * key_dim),
            slice(2 * keys + first * value_dim, 2 * keys + last * value_dim),
        )
        q, k, v = (self.conv1d(inputs, span).float().unflatten(-1, (-1, width))
                   for span, width in zip(spans, (key_dim, key_dim, shape.value_dim), strict=True))  # fmt: skip
        return unit(q) * key_dim**-0.5, unit(k), v


def unit(x: Tensor) -> Tensor:
    """x [..., K] divided by its length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, matrix: Tensor) -> Tensor:
    """The rule for one token. q and k [1, H, K], v [1, H * R, V], decay and beta [1, H * R] -> o [1, H * R, V].

    matrix [H * R, K, V] is changed in place, without a wait for the device; all are f32.
    """
    shared = v.shape[1] // k.shape[1]
    q, k = q[0].repeat_interleave(shared, 0), k[0].repeat_interleave(shared, 0)
    matrix.mul_(decay[0].exp()[:, None, None])
    held = torch.bmm(k[:, None], matrix)
    matrix.addcmul_(k[:, :, None], beta[0, :, None, None] * (v[0, :, None] - held))
    return torch.bmm(q[:, None], matrix).transpose(0, 1)


def chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, matrix: Tensor) -> Tensor:
    """As `token` for T tokens: q and k [T, H, K], v [T, H * R, V], decay and beta [T, H * R] -> o [T, H * R, V].

    With G the sum of the decays since the start of a chunk and D_ij = exp(G_i - G_j) for j <= i, else 0, the writes U
    of a chunk to a matrix S solve (1 + A) U = beta v - beta exp(G) k S, where A = beta (k k^T) D below its diagonal.
    Then o = exp(G) q S + (q k^T D) U, and S becomes exp(G_last) S + k^T exp(G_last - G) U. G_i - G_j is summed anew
    for every j: heads that forget fast have a G of some hundreds, whose difference would have lost its last digits.
    """
    tokens, heads, key_dim = k.shape
    shared, size = v.shape[1] // heads, min(CHUNK, tokens)
    q, k = (_in_chunks(each, size, 1)[:, :, 0] for each in (q, k))  # [n, H, size, K]
    v, decay, beta = (_in_chunks(each, size, shared) for each in (v, decay[..., None], beta[..., None]))
    later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu()  # j >= i
    between = decay.expand(-1, -1, -1, -1, size).masked_fill(later, 0).cumsum_(3)  # [n, H, R, size, size]
    between = between.masked_fill_(later.triu(1), -torch.inf).exp_()
    since = decay.cumsum(3).exp()  # [n, H, R, size, 1]
    system = (k @ k.mT)[:, :, None] * between * beta
    wanted = torch.cat((v * beta, k[:, :, None] * (beta * since)), -1)
    writes, reads = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        (v.shape[-1], key_dim), -1
    )
    del system, wanted
    within = (q @ k.mT)[:, :, None] * between
    out = torch.empty_like(v)
    state = matrix.clone().view(heads, shared, *matrix.shape[1:])  # gradients need the old one
    for index in range(len(k)):
        written = writes[index] - reads[index] @ state
        out[index] = (q[index, :, None] @ state) * since[index] + within[index] @ written
        until = between[index, ..., -1:, :].mT  # [H, R, size, 1]
        state = state * since[index, ..., -1:, :] + k[index, :, None].mT @ (written * until)
    matrix.copy_(state.flatten(0, 1))
    return out.permute(0, 3, 1, 2, 4).reshape(-1, heads * shared, v.shape[-1])[:tokens]


def _in_chunks(x: Tensor, size: int, shared: int) -> Tensor:
    """x [T, H * shared, w] -> [n, H, shared, size, w]; zeros behind the last token, which change no matrix."""
    _, heads, width = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % size))
    return x.view(-1, size, heads // shared, shared, width).permute(0, 2, 3, 1, 4)
