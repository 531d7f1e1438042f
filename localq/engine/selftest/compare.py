"""Comparison of results in the self-test: within the roundings of 16 bit, or bit for bit.

Bounds follow from the arithmetic: a result may differ from fp64 by its own rounding and those of its inputs, so by a
few units of the last place of the sum of magnitudes. Anything worse is a wrong table, lane or index, not rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.formats.cases import ROUNDINGS
from localq.kernels.gemv import Norm

EPS = 1e-5
HALF = torch.float16
OUT, COLUMNS = 83, 640  # of most matrices: tiles of 16 rows and a rest; a whole chunk of 8 blocks of NF4 and a rest


class Mismatch(Exception):
    """A kernel's result is not the reference's; the text says how far off it is."""


def normal(*shape: int, seed: int = 1) -> Tensor:
    """f32 on the CPU, the same for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(got: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """|got - exact| within the roundings of 16 bit; all on the CPU, exact and magnitude in fp64."""
    error = (got.cpu().double() - exact).abs()
    allowed = ROUNDINGS * torch.finfo(HALF).eps * magnitude + 1e-6
    if not bool((error <= allowed).all()):
        worst = int((error / allowed).nan_to_num(torch.inf).argmax())
        raise Mismatch(f"element {worst} is off by {float(error.flatten()[worst]):.3g}")


def same(got: Tensor, expected: Tensor) -> None:
    """Bit for bit; `expected` on the CPU."""
    if not torch.equal(got.cpu(), expected):
        raise Mismatch("the result differs from the reference")


def near_product(got: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """got = residual + x weight^T; weight f32 [out, in] on the CPU."""
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if residual is not None:
        exact, magnitude = exact + residual.double(), magnitude + residual.double().abs()
    near(got, exact, magnitude)


def near_gated(
    run: Callable[[Norm, Tensor], Tensor], x: Tensor, gate: Tensor, up: Tensor, device: torch.device
) -> None:
    """silu(norm(x) gate^T) * norm(x) up^T, as the MLP of a decode step has it."""
    factor = 1 + 0.5 * normal(x.shape[1], seed=3)
    got = run(Norm(factor.to(HALF).to(device), EPS), x[:1].to(device))
    wide = x[:1].double()
    wide = wide * torch.rsqrt(wide.square().mean() + EPS) * factor.to(HALF).double()
    first, second = wide @ gate.double().T, wide @ up.double().T
    sizes = wide.abs() @ gate.double().abs().T, wide.abs() @ up.double().abs().T
    near(got, F.silu(first) * second, 2 * (sizes[0] * second.abs() + first.abs() * sizes[1]))
