"""Rows of the NF4 products: matrix-vector for 1 to 8 rows, matrix-matrix above, beside cuBLAS and bitsandbytes.

All in tiled order, as the loader leaves weights. bitsandbytes gets the same matrices in its own order, one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localq.bench.kernels import products
from localq.bench.kernels.nf4_weights import Weights, copies, for_bitsandbytes
from localq.bench.kernels.shapes import Product, Workload
from localq.bench.kernels.table import BITSANDBYTES, NOT_INSTALLED, Rival, Row
from localq.bench.kernels.timing import SEED, Bench, check, guarded, installed, type_name
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.nf4.kernel import Nf4Operand

Multiply = Callable[[products.Inputs, Sequence[Nf4Operand], Tensor], Tensor]

PLAIN_CASES = ((1, torch.float16), (8, torch.float16), (1, torch.bfloat16), (8, torch.bfloat16))
FUSED_CASES = ((1, torch.float16),)
BATCH_ROWS = (9, 16, 64, 256)


def gemv_cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured, matrix by matrix."""
    return [
        partial(gemv_row, product=product, rows=rows, dtype=dtype)
        for product in work.nf4
        for rows, dtype in (FUSED_CASES if product.form else PLAIN_CASES)
    ]


def gemm_cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """The same for 9 and more rows."""
    return [
        partial(gemm_row, product=product, rows=rows, dtype=torch.float16)
        for product in work.batches
        for rows in BATCH_ROWS
    ]


def gemv_row(bench: Bench, product: Product, rows: int, dtype: torch.dtype) -> Row:
    """One `nf4_gemv`, checked and timed."""

    def multiply(given: products.Inputs, matrices: Sequence[Nf4Operand], out: Tensor) -> Tensor:
        return nf4_kernel.nf4_gemv(
            given.x, matrices, norm=given.norm, residual=given.residual, activation=given.activation, out=out
        )

    return _row(bench, "nf4", "nf4_gemv", multiply, product, rows, dtype)


def gemm_row(bench: Bench, product: Product, rows: int, dtype: torch.dtype) -> Row:
    """One `nf4_gemm`, checked and timed."""

    def multiply(given: products.Inputs, matrices: Sequence[Nf4Operand], out: Tensor) -> Tensor:
        return nf4_kernel.nf4_gemm(given.x, matrices[0], out=out)

    return _row(bench, "gemm", "nf4_gemm", multiply, product, rows, dtype)


def _row(
    bench: Bench, family: str, op: str, multiply: Multiply, product: Product, rows: int, dtype: torch.dtype
) -> Row:
    given = products.inputs(bench, product, rows, dtype)
    weights = _weights(bench, product)
    tiled = [each.tiled() for each in weights]
    out = torch.empty(rows, product.width, dtype=dtype, device=bench.device)
    what = products.describe(product)
    dense = _check(op, what, multiply(given, tiled, out), given, weights, dtype)
    timing = bench.time([partial(multiply, given, each, out) for each in _rotation(bench, tiled)])
    moved = given.nbytes + nf4_kernel.nf4_weight_bytes(product.count) + out.nbytes
    theirs = guarded(BITSANDBYTES, lambda: _bitsandbytes(bench, given.x, weights))
    rivals = (products.cublas(bench, given.x, dense), theirs)
    return Row(family, op, what, rows, type_name(dtype), moved, timing, rivals)


def _weights(bench: Bench, product: Product) -> list[Weights]:
    """The matrices of a launch, which reads the small tables from one place."""
    made = [
        Weights.random((out, product.columns), bench.device, SEED + index) for index, out in enumerate(product.outs)
    ]
    return [made[0], *(each.with_tables_of(made[0]) for each in made[1:])]


def _check(
    op: str, what: str, got: Tensor, given: products.Inputs, weights: Sequence[Weights], dtype: torch.dtype
) -> list[Tensor]:
    """Compares, and returns the dequantized matrices in `dtype`."""
    exact = products.exact(given, [each.dense() for each in weights])
    dense = [each.dense(dtype) for each in weights]
    check(op, what, got, exact, products.naive(given, dense))
    return dense


def _rotation(bench: Bench, matrices: list[Nf4Operand]) -> list[list[Nf4Operand]]:
    """Copies of all matrices of a launch, launch by launch."""
    size = sum(nf4_kernel.nf4_weight_bytes(matrix.count) for matrix in matrices)
    columns = [copies(matrix, bench.copies(size)) for matrix in matrices]
    return [list(each) for each in zip(*columns, strict=True)]


def _bitsandbytes(bench: Bench, x: Tensor, weights: Sequence[Weights]) -> Rival:
    if not installed(BITSANDBYTES):
        return Rival(BITSANDBYTES, None, NOT_INSTALLED)
    from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]  # a rival that need not be there

    rotation = _rotation(bench, [each.matrix for each in weights])
    theirs = [[for_bitsandbytes(matrix, x.dtype) for matrix in matrices] for matrices in rotation]

    def multiply(operands: Sequence[tuple[Tensor, Any]]) -> None:
        for codes, state in operands:
            matmul_4bit(x, codes, state)

    return bench.rival(BITSANDBYTES, [partial(multiply, operands) for operands in theirs])
