"""Rows of the products with 4-bit weights of 16 values a row, beside cuBLAS with the same weights in 16 bit.

And of their dequantization.
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
from localq.formats import squeezellm
from localq.formats.squeezellm import kernel as squeezellm_kernel
from localq.formats.squeezellm import tiles as squeezellm_tiles
from localq.formats.squeezellm.kernel import RowLutOperand

HALF = torch.float16
PLAIN_CASES = ((1, HALF), (2, HALF), (4, HALF), (8, HALF), (1, torch.bfloat16))  # rows of x, its type
FUSED_CASES = ((1, HALF),)


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured: products, and the dequantization."""
    found: list[Callable[[Bench], Row]] = [
        partial(gemv_row, product=product, rows=rows, dtype=dtype)
        for product in work.nf4
        for rows, dtype in (FUSED_CASES if product.form else PLAIN_CASES)
    ]
    return found + [partial(dequantize_row, product=product) for product in work.dequantized]


def gemv_row(bench: Bench, product: Product, rows: int, dtype: torch.dtype) -> Row:
    """One `rowlut_gemv`, checked and timed."""
    given = products.inputs(bench, product, rows, dtype)
    matrices = [_made(bench, out, product.columns, index) for index, out in enumerate(product.outs)]
    out = torch.empty(rows, product.width, dtype=dtype, device=bench.device)

    def multiply(of: Sequence[RowLutOperand]) -> Tensor:
        return squeezellm_kernel.rowlut_gemv(
            given.x, of, norm=given.norm, residual=given.residual, activation=given.activation, out=out
        )

    what = products.describe(product)
    wide = [_dense(each, torch.float32) for each in matrices]
    dense = [each.to(dtype) for each in wide]
    check("rowlut_gemv", what, multiply(matrices), products.exact(given, wide), products.naive(given, dense))
    del wide
    stored = sum(each.nbytes for each in matrices)
    copies = [[_copied(each) for each in matrices] for _ in range(bench.copies(stored))]
    timing = bench.time([partial(multiply, each) for each in copies])
    rivals = (products.cublas(bench, given.x, dense),)
    moved = given.nbytes + stored + out.nbytes
    return Row("rowlut", "rowlut_gemv", what, rows, type_name(dtype), moved, timing, rivals)


def dequantize_row(bench: Bench, product: Product) -> Row:
    """One `rowlut_dequantize` of a whole matrix to f16, checked bit by bit and timed."""
    matrix = _made(bench, product.outs[0], product.columns, 0)
    reference = _dense(matrix, HALF)
    if not torch.equal(squeezellm_kernel.rowlut_dequantize(matrix, 0, torch.empty_like(reference)), reference):
        raise wrong("rowlut_dequantize", product.name, "differs from the reference")
    moved = squeezellm_kernel.rowlut_dequantize_bytes(product.outs[0], product.columns, HALF)
    # Each copy has a result of its own: one that stays in the cache would not have to be written.
    launches = [
        partial(squeezellm_kernel.rowlut_dequantize, _copied(matrix), 0, torch.empty_like(reference))
        for _ in range(bench.copies(moved))
    ]
    return Row("rowlut", "rowlut_dequantize", product.name, 0, type_name(HALF), moved, bench.time(launches))


def _made(bench: Bench, out: int, columns: int, index: int) -> RowLutOperand:
    """Random codes, in tiles as models have them; rows of about unit gain."""
    generator = torch.Generator(bench.device).manual_seed(SEED + index)
    codes = torch.randint(256, (out, columns // 2), dtype=torch.uint8, device=bench.device, generator=generator)
    table = bench.normal(out, squeezellm_kernel.VALUES, seed=SEED + index).div_(columns**0.5).sort(1).values
    matrix = squeezellm.Linear(squeezellm.Packed(codes, table.to(HALF))).tile_().operand()
    assert matrix is not None  # whole loads
    return matrix


def _dense(matrix: RowLutOperand, dtype: torch.dtype) -> Tensor:
    codes = squeezellm_tiles.untile(matrix.codes) if matrix.tiled else matrix.codes
    return squeezellm.dequantize(squeezellm.Packed(codes, matrix.table), dtype)


def _copied(matrix: RowLutOperand) -> RowLutOperand:
    return replace(matrix, codes=matrix.codes.clone(), table=matrix.table.clone())
