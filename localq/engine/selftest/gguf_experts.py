"""Mixtures of experts in GGUF blocks for the self-test: random, small, one of each kind of block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.engine.selftest.compare import EPS, HALF, near, normal
from localq.formats.gguf import codec, tiles
from localq.formats.gguf import experts_kernel as gguf_experts
from localq.formats.gguf.codec import Packed
from localq.formats.gguf.experts_kernel import GgufStack, gguf_stack
from localq.formats.gguf.kernel import GgufOperand
from localq.formats.gguf.samples import sample
from localq.kernels.gemv import Norm

EXPERTS, OUT, COLUMNS = 4, 80, 768
TYPES = ("Q4_K", "Q6_K", "Q2_K", "Q8_0", "Q5_1", "IQ4_XS", "NVFP4", "IQ3_S", "IQ1_S", "TQ1_0")
GATE_UP = (*((type, type) for type in TYPES), ("Q4_K", "Q6_K"))
CHOSEN = [3, 0, 2]


def _stacks(kinds: Iterable[tuple[str, ...]], device: torch.device) -> Iterator[tuple[GgufStack, Tensor]]:
    """One of each kind, a type for each part, on the device; its weights f32 [E, parts, out, in] on the CPU."""
    for types in kinds:
        packed = [[sample((OUT, COLUMNS), 8 * expert + part, scheme=type) for part, type in enumerate(types)]
                  for expert in range(EXPERTS)]  # fmt: skip
        dense = torch.stack([torch.stack([codec.dequantize(each, torch.float32) for each in some]) for some in packed])
        yield gguf_stack([[_operand(each, device) for each in some] for some in packed]), dense


def _operand(packed: Packed, device: torch.device) -> GgufOperand:
    return GgufOperand(tiles.tile(packed.blocks, packed.type).to(device), packed.type, factor=packed.factor)


def gate_up(device: torch.device) -> None:
    """With a norm."""
    x, factor = normal(1, COLUMNS, seed=7).to(HALF), (1 + 0.1 * normal(COLUMNS, seed=8)).to(HALF)
    wide = (x.double() * torch.rsqrt(x.double().square().mean() + EPS) * factor.double())[0]
    chosen, norm = torch.tensor(CHOSEN, dtype=torch.int32, device=device), Norm(factor.to(device), EPS)
    for stack, dense in _stacks(GATE_UP, device):
        gates = torch.empty(len(CHOSEN), OUT, device=device) if stack.has_two_types else None
        out = torch.full((len(CHOSEN), OUT), torch.nan, dtype=HALF, device=device)
        gguf_experts.gguf_experts_gate_up(x.to(device), stack, chosen, norm=norm, out=out, gates=gates)
        of = dense[CHOSEN].double()
        (g, u), (gs, us) = (each.unbind(1) for each in (of @ wide, of.abs() @ wide.abs()))
        near(out, F.silu(g) * u, 2 * (gs * u.abs() + (g.abs() + 1) * us))


def down(device: torch.device) -> None:
    """The residual updated in place."""
    gated, residual = normal(len(CHOSEN), COLUMNS, seed=7).to(HALF), normal(1, OUT, seed=10).to(HALF)
    weights, chosen = torch.tensor([0.5, 0.3, 0.2]), torch.tensor(CHOSEN, dtype=torch.int32, device=device)
    for stack, dense in _stacks(((type,) for type in TYPES), device):
        of, scaled, out = dense[CHOSEN, 0].double(), weights.double()[None], residual.to(device, copy=True)
        gguf_experts.gguf_experts_down(gated.to(device), stack, chosen, weights.to(device), residual=out, out=out)
        parts, sizes = (torch.einsum("koi,ki->ko", each, x) for each, x in (
            (of, gated.double()), (of.abs(), gated.double().abs())
        ))  # fmt: skip
        near(out, residual.double() + scaled @ parts, residual.double().abs() + scaled @ sizes)
