"""Rows of the products with 16- and 8-bit weights, beside cuBLAS with the same weights in 16 bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from localq.bench.kernels import products
from localq.bench.kernels.shapes import Product, Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, check, clones, type_name
from localq.formats import int8 as int8_format
from localq.formats.int8 import kernel as int8_kernel
from localq.formats.int8.kernel import Int8Operand
from localq.kernels import dense
from localq.kernels.dense import DenseOperand

PLAIN_CASES = ((1, torch.float16), (8, torch.float16), (1, torch.bfloat16))
FUSED_CASES = ((1, torch.float16),)


def _cases(measured: Sequence[Product], row: Callable[..., Row]) -> list[Callable[[Bench], Row]]:
    return [
        partial(row, product=product, rows=rows, dtype=dtype)
        for product in measured
        for rows, dtype in (FUSED_CASES if product.form else PLAIN_CASES)
    ]


def dense_cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured of `dense_gemv`."""
    return _cases(work.dense, dense_row)


def int8_cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured of `int8_gemv`."""
    return _cases(work.int8, int8_row)


def dense_row(bench: Bench, product: Product, rows: int, dtype: torch.dtype) -> Row:
    """One `dense_gemv`, checked and timed."""
    given = products.inputs(bench, product, rows, dtype)
    weights = [
        (bench.normal(out, product.columns, seed=SEED + index) / 64).to(dtype) for index, out in enumerate(product.outs)
    ]
    out = torch.empty(rows, product.width, dtype=dtype, device=bench.device)

    def multiply(matrices: Sequence[Tensor]) -> Tensor:
        return dense.dense_gemv(
            given.x,
            [DenseOperand(each) for each in matrices],
            norm=given.norm,
            residual=given.residual,
            activation=given.activation,
            out=out,
        )

    what = products.describe(product)
    naive = products.naive(given, weights)
    check("dense_gemv", what, multiply(weights), products.exact(given, weights), naive)
    stored = sum(weight.nbytes for weight in weights)
    copies = [list(clones(weight, bench.copies(stored))) for weight in weights]
    timing = bench.time([partial(multiply, each) for each in zip(*copies, strict=True)])
    rivals = (products.cublas(bench, given.x, weights),)
    moved = given.nbytes + stored + out.nbytes
    return Row("dense", "dense_gemv", what, rows, type_name(dtype), moved, timing, rivals)


def int8_row(bench: Bench, product: Product, rows: int, dtype: torch.dtype) -> Row:
    """One `int8_gemv` of a single matrix, checked and timed; logits, so the result is f32."""
    given = products.inputs(bench, product, rows, dtype)
    packed = int8_format.quantize(bench.normal(product.outs[0], product.columns).to(dtype))
    matrix = Int8Operand(packed.codes, packed.scales)
    out = torch.empty(rows, product.width, dtype=torch.float32, device=bench.device)

    def multiply(weights: Int8Operand) -> Tensor:
        return int8_kernel.int8_gemv(given.x, [weights], out=out)

    what = products.describe(product)
    weight = int8_format.dequantize(packed, torch.float32)
    dense_weight = weight.to(dtype)
    check("int8_gemv", what, multiply(matrix), products.exact(given, [weight]), products.naive(given, [dense_weight]))
    del weight
    stored = matrix.codes.nbytes + matrix.scales.nbytes
    pairs = zip(clones(matrix.codes, bench.copies(stored)), clones(matrix.scales, bench.copies(stored)), strict=True)
    timing = bench.time([partial(multiply, Int8Operand(codes, scales)) for codes, scales in pairs])
    rivals = (products.cublas(bench, given.x, [dense_weight]),)
    moved = given.nbytes + stored + out.nbytes
    return Row("int8", "int8_gemv", what, rows, type_name(dtype), moved, timing, rivals)
