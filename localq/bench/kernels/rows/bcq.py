"""Rows of matrices in binary codes: products beside cuBLAS with the same weights in 16 bit, weights for prefill.

And `localq bench --bcq`: latency and size against planes and groups, as nuQmm's paper has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from localq.bench.kernels import products
from localq.bench.kernels.shapes import Product, Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, check, type_name, wrong
from localq.files.schemes import bcq_scheme
from localq.formats import bcq as bcq_format
from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.bcq.kernel import BcqOperand

HALF = torch.float16
SCHEME = "q3g128"
# Scheme, rows of x, its type.
PLAIN_CASES = (
    (SCHEME, 1, HALF), (SCHEME, 2, HALF), (SCHEME, 4, HALF), (SCHEME, 8, HALF), (SCHEME, 1, torch.bfloat16),
    ("q2g128", 1, HALF), ("q4g128", 1, HALF), ("q3g32", 1, HALF), ("q3g128z", 1, HALF), ("q2row", 1, HALF),
)  # fmt: skip
FUSED_CASES = ((SCHEME, 1, HALF), ("q2g128", 1, HALF))
SQUARES = "4096x4096,7168x7168,12288x12288"  # of the paper
GROUPS = ("g32", "g64", "g128", "g256", "g512", "row")


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured."""
    found: list[Callable[[Bench], Row]] = [
        partial(gemv_row, product=product, scheme=scheme, rows=rows, dtype=dtype)
        for product in work.nf4
        for scheme, rows, dtype in (FUSED_CASES if product.form else PLAIN_CASES)
    ]
    return found + [partial(dequantize_row, product=product, scheme=SCHEME) for product in work.dequantized]


def trade_offs(work: Workload) -> list[Callable[[Bench], Row]]:
    """One row of x with every number of planes and every group."""
    schemes = [f"q{planes}{group}" for planes in range(1, bcq_kernel.PLANES + 1) for group in GROUPS]
    return [
        partial(gemv_row, product=product, scheme=scheme, rows=1, dtype=HALF)
        for product in work.nf4
        for scheme in schemes
    ]


def gemv_row(bench: Bench, product: Product, scheme: str, rows: int, dtype: torch.dtype) -> Row:
    """One `bcq_gemv`, checked and timed."""
    given = products.inputs(bench, product, rows, dtype)
    made = [_packed(bench, out, product.columns, scheme, SEED + i) for i, out in enumerate(product.outs)]
    matrices = _tiled(made)
    out = torch.empty(rows, product.width, dtype=dtype, device=bench.device)

    def multiply(of: Sequence[BcqOperand]) -> Tensor:
        return bcq_kernel.bcq_gemv(
            given.x, of, norm=given.norm, residual=given.residual, activation=given.activation, out=out
        )

    stored = sum(each.nbytes for each in made)
    what = f"{products.describe(product)}, {scheme}, {stored / 1e6:.1f} MB"
    wide = [bcq_format.dequantize(each, torch.float32) for each in made]
    dense = [each.to(dtype) for each in wide]
    check("bcq_gemv", what, multiply(matrices), products.exact(given, wide), products.naive(given, dense))
    del wide
    copies = [_copied(matrices) for _ in range(bench.copies(stored))]
    timing = bench.time([partial(multiply, each) for each in copies])
    rivals = (products.cublas(bench, given.x, dense),)
    return Row("bcq", "bcq_gemv", what, rows, type_name(dtype), given.nbytes + stored + out.nbytes, timing, rivals)


def dequantize_row(bench: Bench, product: Product, scheme: str) -> Row:
    """One `bcq_dequantize` of a whole matrix to f16, checked bit by bit and timed."""
    packed = _packed(bench, product.outs[0], product.columns, scheme, SEED)
    reference, (matrix,) = bcq_format.dequantize(packed, HALF), _tiled([packed])
    what = f"{product.name}, {scheme}"
    if not torch.equal(bcq_kernel.bcq_dequantize(matrix, 0, torch.empty_like(reference)), reference):
        raise wrong("bcq_dequantize", what, "differs from the definition")
    planes, group, _ = bcq_scheme(scheme)
    moved = bcq_kernel.bcq_dequantize_bytes(*packed.shape, planes, group)
    # Each copy has a result of its own: one that stays in the cache would not have to be written.
    launches = [
        partial(bcq_kernel.bcq_dequantize, _copied([matrix])[0], 0, torch.empty_like(reference))
        for _ in range(bench.copies(moved))
    ]
    return Row("bcq", "bcq_dequantize", what, 0, type_name(HALF), moved, bench.time(launches))


def _packed(bench: Bench, out: int, columns: int, scheme: str, seed: int) -> bcq_format.Packed:
    """Random signs; scales of halves, as the planes of real weights have them, and rows of about unit gain."""
    planes, group, zero_point = bcq_scheme(scheme)
    generator = torch.Generator(bench.device).manual_seed(seed)
    codes = torch.randint(256, (out, planes, columns // 8), dtype=torch.uint8, device=bench.device, generator=generator)
    scales = bench.normal(out, planes + zero_point, -(-columns // (group or columns)), seed=seed).mul_(0.1).add_(1)
    halves = 0.5 ** torch.arange(planes + zero_point, device=bench.device)
    return bcq_format.Packed(codes, (scales * halves[:, None] / columns**0.5).to(HALF))


def _tiled(made: Sequence[bcq_format.Packed]) -> list[BcqOperand]:
    """As the kernels take them; `made` stays as it is."""
    linears = [bcq_format.Linear(bcq_format.Packed(each.codes.clone(), each.scales.clone())) for each in made]
    matrices = [linear.put_into_tiles().operand() for linear in linears]
    return [matrix for matrix in matrices if matrix is not None]


def _copied(matrices: Sequence[BcqOperand]) -> list[BcqOperand]:
    return [replace(each, codes=each.codes.clone(), scales=each.scales.clone()) for each in matrices]
