"""The reference of `delta_decode`: a random step of a gated delta net, and what f64 makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.kernels import delta_net
from localq.kernels.delta_net import DIM, TAPS, DeltaWeights, DeltaWorkspace
from localq.models.gated_delta_net import EPSILON

ROUNDED = 4  # results may differ by that many roundings: of q, k and v, which go either way at a tie, of o, of its norm


@dataclass
class DeltaCase:
    """Operands of `delta_decode`, on one device."""

    weights: DeltaWeights
    inputs: Tensor
    gates: Tensor
    write: Tensor
    decay: Tensor
    columns: Tensor
    matrix: Tensor

    def run(self, workspace: DeltaWorkspace, out: Tensor | None = None) -> Tensor:
        """Run the kernel: one token, after which columns and matrix have moved on."""
        return delta_net.delta_decode(
            self.inputs, self.gates, self.write, self.decay, self.weights, self.columns, self.matrix, workspace, out
        )

    def workspace(self) -> DeltaWorkspace:
        """Return a workspace for it."""
        return DeltaWorkspace(self.weights.key_heads, self.weights.value_heads, self.inputs.device)


def draw(key_heads: int, shared: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DeltaCase:
    """Return a step in the middle of a text; shared: value heads per key head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    heads, channels = key_heads * shared, (2 + shared) * key_heads * DIM
    rates = -(torch.rand(heads, generator=generator) * 4 + 0.05)  # what is kept: from little to nearly all
    offsets, matrix = torch.randn(heads, generator=generator), torch.randn(heads, DIM, DIM, generator=generator)
    taps, norm = normal(channels, TAPS, scale=0.6), normal(DIM) + 1
    weights = DeltaWeights(taps, rates.to(device), offsets.to(device), norm, 1e-6, key_heads)
    return DeltaCase(
        weights, normal(1, channels), normal(1, heads * DIM), normal(1, heads), normal(1, heads),
        normal(channels, TAPS - 1), matrix.to(device),
    )  # fmt: skip


def expected(case: DeltaCase) -> tuple[Tensor, Tensor, Tensor]:
    """(out [1, heads * 128], columns, matrix) after the step, in f64 but for the columns; `case` stays as it is.

    Rounded to the type of the operands where the kernel rounds.
    """
    weights, dtype = case.weights, case.inputs.dtype
    heads, shared = weights.value_heads, weights.value_heads // weights.key_heads

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    window = torch.cat((case.columns, case.inputs.T), 1)
    mixed = rounded((window.double() * weights.taps.double()).sum(1))
    sizes = [weights.key_heads * DIM, weights.key_heads * DIM, heads * DIM]
    q, k, v = torch.split(rounded(F.silu(mixed)), sizes)
    q, k = (each.view(-1, DIM) for each in (q, k))
    q, k = (each * (each.square().sum(1, keepdim=True) + EPSILON).rsqrt() for each in (q, k))
    q, k = (each.repeat_interleave(shared, 0) for each in (q * DIM**-0.5, k))
    beta = rounded(torch.sigmoid(case.write[0].double()))
    kept = torch.exp(weights.rates.double() * F.softplus(case.decay[0].double() + weights.offsets.double()))
    matrix = case.matrix.double() * kept[:, None, None]
    wanted = v.view(heads, DIM) - torch.einsum("hkv,hk->hv", matrix, k)
    matrix = matrix + k[:, :, None] * (beta[:, None] * wanted)[:, None]
    read = rounded(torch.einsum("hkv,hk->hv", matrix, q))
    normed = rounded(read * (read.square().mean(1, keepdim=True) + weights.eps).rsqrt())
    out = rounded(normed * weights.norm.double()) * F.silu(case.gates.view(heads, DIM).double())
    return out.view(1, -1), window[:, 1:], matrix
