"""A launch of a matrix-vector kernel beside what it must equal: fp64, torch's 16-bit computation, and cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from localq.bench.kernels.shapes import GATE_UP, NORM, RESIDUAL, Product
from localq.bench.kernels.table import CUBLAS, Rival
from localq.bench.kernels.timing import SEED, Bench, clones, exact_product
from localq.kernels.gemv import Norm

EPS = 1e-5


@dataclass(frozen=True)
class Inputs:
    """x [rows, in] and the other inputs of the product's form, all in the dtype of x."""

    x: Tensor
    norm: Norm | None
    residual: Tensor | None
    activation: str | None

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        norm = 0 if self.norm is None else self.norm.weight.nbytes
        return self.x.nbytes + norm + (0 if self.residual is None else self.residual.nbytes)


def inputs(bench: Bench, product: Product, rows: int, dtype: torch.dtype) -> Inputs:
    """Normal x with a few columns 50 times the others, as in real models."""
    x = bench.normal(rows, product.columns, seed=SEED + rows)
    x[:, 5::97] *= 50
    norm = residual = None
    if product.form in (NORM, GATE_UP):
        norm = Norm(1 + 0.1 * bench.normal(product.columns, seed=SEED + 1).to(dtype), EPS)
    if product.form == RESIDUAL:
        residual = bench.normal(rows, product.width, dtype=dtype, seed=SEED + 2)
    return Inputs(x.to(dtype), norm, residual, "silu" if product.form == GATE_UP else None)


def exact(given: Inputs, weights: Sequence[Tensor]) -> Tensor:
    """The result in fp64; `weights` f32 [out_i, in]."""
    x = given.x.double()
    if given.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + given.norm.eps) * given.norm.weight.double()
    parts = [exact_product(x, weight) for weight in weights]
    return _joined(given, parts)


def naive(given: Inputs, weights: Sequence[Tensor]) -> Tensor:
    """The result as torch computes it in the dtype of x; `weights` in that dtype."""
    x = given.x
    if given.norm is not None:
        x = F.rms_norm(x, x.shape[-1:], None, given.norm.eps) * given.norm.weight
    return _joined(given, [F.linear(x, weight) for weight in weights])


def _joined(given: Inputs, parts: list[Tensor]) -> Tensor:
    if given.activation is not None:
        return F.silu(parts[0]) * parts[1]
    whole = torch.cat(parts, dim=1)
    return whole if given.residual is None else given.residual + whole


def cublas(bench: Bench, x: Tensor, weights: Sequence[Tensor]) -> Rival:
    """F.linear with all matrices behind each other in the type of x: the product alone, nothing fused."""
    whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    matrices = list(clones(whole, bench.copies(whole.nbytes)))
    launches: list[Callable[[], object]] = [partial(F.linear, x, matrix) for matrix in matrices]
    return bench.rival(CUBLAS, launches)


def describe(product: Product) -> str:
    """Shapes, and what is fused."""
    return product.name + (f" ({product.form})" if product.form else "")
