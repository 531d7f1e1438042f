"""The reference of `delta_decode` and `delta_prefill`: random tokens of a gated delta net, and their results in f64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.kernels import delta_net
from localq.kernels.delta_net import DIM, TAPS, DeltaWeights, DeltaWorkspace
from localq.kernels.gemv import Norm
from localq.models.gated_delta_net import EPSILON

ROUNDED = 4  # results may differ by that many roundings: of q, k and v, which go either way at a tie, of o, of its norm


@dataclass
class DeltaCase:
    """Tokens of a gated delta net, on one device; operands of `delta_prefill`."""

    weights: DeltaWeights
    inputs: Tensor
    gates: Tensor
    write: Tensor
    decay: Tensor
    columns: Tensor
    matrix: Tensor

    def to(self, device: torch.device) -> DeltaCase:
        """Return a copy on another device, or the same where it is there."""
        names = ("inputs", "gates", "write", "decay", "columns", "matrix")
        of = self.weights
        weights = replace(
            of, taps=of.taps.to(device), rates=of.rates.to(device), offsets=of.offsets.to(device),
            norm=of.norm.to(device),
        )  # fmt: skip
        return DeltaCase(weights, **{name: getattr(self, name).to(device) for name in names})

    def prefill(self, workspace: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Run the kernels: all tokens, after which columns and matrix have moved on."""
        return delta_net.delta_prefill(
            self.inputs, self.gates, self.write, self.decay, self.weights, self.columns, self.matrix, workspace, out
        )


@dataclass
class StepCase:
    """Operands of `delta_decode`, on one device: those of a token, and what gives its b and a."""

    token: DeltaCase
    x: Tensor
    norm: Norm
    write: Tensor
    decay: Tensor

    def run(self, workspace: DeltaWorkspace, out: Tensor | None = None) -> Tensor:
        """Run the kernel: one token, after which columns and matrix have moved on."""
        at = self.token
        return delta_net.delta_decode(
            at.inputs, at.gates, self.x, self.norm, self.write, self.decay, at.weights, at.columns, at.matrix,
            workspace, out,
        )  # fmt: skip

    def to(self, device: torch.device) -> StepCase:
        """Return a copy on another device, or the same where it is there."""
        x, weight, write, decay = (each.to(device) for each in (self.x, self.norm.weight, self.write, self.decay))
        return StepCase(self.token.to(device), x, Norm(weight, self.norm.eps), write, decay)

    def clone(self) -> StepCase:
        """Return a case with rows and a state of its own, beside the same weights and token."""
        token = replace(self.token, columns=self.token.columns.clone(), matrix=self.token.matrix.clone())
        return replace(self, token=token, write=self.write.clone(), decay=self.decay.clone())

    def draw(self, generator: torch.Generator) -> None:
        """Go on to another token."""
        for each in (self.token.inputs, self.token.gates, self.x):
            each.copy_(torch.randn(each.shape, generator=generator))

    def workspace(self) -> DeltaWorkspace:
        """Return a workspace for `run`."""
        weights = self.token.weights
        return DeltaWorkspace(weights.key_heads, weights.value_heads, self.x.device)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `expected` of the token."""
        x = self.x.double()
        normed = x * (x.square().mean(1, keepdim=True) + self.norm.eps).rsqrt() * self.norm.weight.double()
        write, decay = (normed @ rows.double().T for rows in (self.write, self.decay))
        return expected(replace(self.token, write=write, decay=decay))


def draw_step(
    key_heads: int, shared: int, dtype: torch.dtype, device: torch.device, seed: int = 0, hidden: int = 320
) -> StepCase:
    """Return a step in the middle of a text; its norm is of weights in f32 where the seed is even."""
    token, generator = draw(key_heads, shared, dtype, device, seed), torch.Generator().manual_seed(seed + 1)
    heads = key_heads * shared
    weight = torch.randn(hidden, generator=generator) * 0.3 + 1
    write, decay = ((torch.randn(heads, hidden, generator=generator) * hidden**-0.5).to(dtype) for _ in range(2))
    x = (torch.randn(1, hidden, generator=generator) * 3).to(dtype)
    norm = Norm((weight if seed % 2 == 0 else weight.to(dtype)).to(device), 1e-6)
    return StepCase(token, x.to(device), norm, write.to(device), decay.to(device))


def draw(
    key_heads: int, shared: int, dtype: torch.dtype, device: torch.device, seed: int = 0, tokens: int = 1
) -> DeltaCase:
    """Return tokens in the middle of a text; shared: value heads per key head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    heads, channels = key_heads * shared, (2 + shared) * key_heads * DIM
    rates = -(torch.rand(heads, generator=generator) * 4 + 0.05)  # what is kept: from little to nearly all
    offsets, matrix = torch.randn(heads, generator=generator), torch.randn(heads, DIM, DIM, generator=generator)
    taps, norm = normal(channels, TAPS, scale=0.6), normal(DIM) + 1
    weights = DeltaWeights(taps, rates.to(device), offsets.to(device), norm, 1e-6, key_heads)
    return DeltaCase(
        weights, normal(tokens, channels), normal(tokens, heads * DIM), normal(tokens, heads), normal(tokens, heads),
        normal(channels, TAPS - 1), matrix.to(device),
    )  # fmt: skip


def expected(case: DeltaCase) -> tuple[Tensor, Tensor, Tensor]:
    """(out [T, heads * 128], columns, matrix) after the tokens, in f64 but for the columns; `case` stays as it is.

    Token by token; rounded to the type of the operands where the kernels round. b in f64 is of `delta_decode`, which
    does not round beta.
    """
    weights, beta = case.weights, torch.sigmoid(case.write.double())
    beta = beta if case.write.dtype == torch.float64 else beta.to(case.inputs.dtype).double()
    kept = torch.exp(weights.rates.double() * F.softplus(case.decay.double() + weights.offsets.double()))
    return after(case, beta, kept)


def after(case: DeltaCase, beta: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `expected`, with beta and exp(g) f64 [T, heads] instead of the `write` and `decay` of `case`."""
    weights, dtype, tokens = case.weights, case.inputs.dtype, case.inputs.shape[0]
    heads, shared = weights.value_heads, weights.value_heads // weights.key_heads

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    window = torch.cat((case.columns.T, case.inputs))
    taps = weights.taps.double()
    mixed = rounded(torch.stack([window[tap : tap + tokens].double() * taps[:, tap] for tap in range(TAPS)]).sum(0))
    sizes = [weights.key_heads * DIM, weights.key_heads * DIM, heads * DIM]
    q, k, v = torch.split(rounded(F.silu(mixed)), sizes, 1)
    q, k = (each.view(tokens, -1, DIM) for each in (q, k))
    q, k = (each * (each.square().sum(2, keepdim=True) + EPSILON).rsqrt() for each in (q, k))
    q, k = (each.repeat_interleave(shared, 1) for each in (q * DIM**-0.5, k))
    v = v.view(tokens, heads, DIM)
    matrix, rows = case.matrix.double(), []
    for at in range(tokens):
        matrix = matrix * kept[at, :, None, None]
        wanted = v[at] - torch.einsum("hkv,hk->hv", matrix, k[at])
        matrix = matrix + k[at, :, :, None] * (beta[at, :, None] * wanted)[:, None]
        rows.append(torch.einsum("hkv,hk->hv", matrix, q[at]))
    read = rounded(torch.stack(rows))
    normed = rounded(read * (read.square().mean(2, keepdim=True) + weights.eps).rsqrt())
    out = rounded(normed * weights.norm.double()) * F.silu(case.gates.view(tokens, heads, DIM).double())
    return out.view(tokens, -1), window[tokens:].T, matrix
