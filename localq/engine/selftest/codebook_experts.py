"""Mixtures of experts in codebooks for the self-test: random, small, of odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.engine.selftest.compare import EPS, HALF, near, normal
from localq.engine.selftest.formats import linear_of, multiplied
from localq.formats.cases import BY_OP, Case
from localq.formats.codebooks import experts_kernel as codebook_experts
from localq.formats.codebooks import rotation
from localq.formats.codebooks.experts_kernel import VqStack, vq_stack
from localq.formats.codebooks.lookup_kernel import VqOperand
from localq.kernels.gemv import Norm

EXPERTS, OUT, COLUMNS = 4, 83, 704  # a rest of a tile, of a table and of a slice
CHOSEN = [3, 0, 2]


def _stacks(parts: int, device: torch.device) -> Iterator[tuple[VqStack, Tensor]]:
    """One of each scheme on the device, and its weights f32 [E, parts, out, in] on the CPU."""
    for like in BY_OP["vq_gemv"].quick:
        case = replace(like, shape=(OUT, COLUMNS))
        made = [[_matrix(case, device, 8 * expert + part) for part in range(parts)] for expert in range(EXPERTS)]
        dense = torch.stack([torch.stack([weight for _, weight in each]) for each in made])
        yield vq_stack([[matrix for matrix, _ in each] for each in made]), dense


def _matrix(case: Case, device: torch.device, seed: int) -> tuple[VqOperand, Tensor]:
    linear, packed = linear_of(case, device, seed, True)
    operand = linear.operand()
    assert isinstance(operand, VqOperand)  # a layout that the kernel reads
    return operand, multiplied(case, packed)


def gate_up(device: torch.device) -> None:
    """With a norm."""
    x, factor = normal(1, COLUMNS, seed=7).to(HALF), (1 + 0.1 * normal(COLUMNS, seed=8)).to(HALF)
    wide = (x.double() * torch.rsqrt(x.double().square().mean() + EPS) * factor.double())[0]
    chosen, norm = torch.tensor(CHOSEN, dtype=torch.int32, device=device), Norm(factor.to(device), EPS)
    for stack, dense in _stacks(2, device):
        out = torch.full((len(CHOSEN), OUT), torch.nan, dtype=HALF, device=device)
        codebook_experts.vq_experts_gate_up(x.to(device), stack, chosen, norm=norm, out=out)
        of = dense[CHOSEN].double()
        (g, u), (gs, us) = (each.unbind(1) for each in (of @ wide, of.abs() @ wide.abs()))
        near(out, F.silu(g) * u, 2 * (gs * u.abs() + (g.abs() + 1) * us))


def down(device: torch.device) -> None:
    """The residual updated in place; plain and rotated."""
    gated, residual = normal(len(CHOSEN), COLUMNS, seed=7).to(HALF), normal(1, OUT, seed=10).to(HALF)
    signs = rotation.packed_signs(normal(COLUMNS, seed=2) < 0)
    weights, chosen = torch.tensor([0.5, 0.3, 0.2]), torch.tensor(CHOSEN, dtype=torch.int32, device=device)
    for stack, dense in _stacks(1, device):
        of, scaled = dense[CHOSEN, 0].double(), weights.double()[None]
        for minus, x in ((None, gated), (signs.to(device), rotation.rotate(gated, signs))):
            out = residual.to(device, copy=True)
            given = (gated.to(device), stack, chosen, weights.to(device))
            codebook_experts.vq_experts_down(*given, residual=out, out=out, signs=minus)
            parts = torch.einsum("koi,ki->ko", of, x.double())
            sizes = torch.einsum("koi,ki->ko", of.abs(), x.double().abs())
            near(out, residual.double() + scaled @ parts, residual.double().abs() + scaled @ sizes)
